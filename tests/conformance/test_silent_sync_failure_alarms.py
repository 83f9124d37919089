"""Weights never arrived in the sampler; only the logprob gap showed it (TRL #5312)."""

from pathlib import Path
from typing import Any

import jax
import pytest

from tests.actor.scripted import CONFIG, ScriptedLearner, run_actor
from tests.actor.support import MODEL, weights
from tests.actor.test_served_actor import served
from tests.data.support import make_rows
from tests.support.server_process import ServerProcess
from tunix_core.actor.engines import make_engine
from tunix_core.config import RunConfig
from tunix_core.data.groups import Group
from tunix_core.data.packing import window_sizes
from tunix_core.learner import objectives
from tunix_core.learner.batches import assemble
from tunix_core.learner.gap_watch import GapWatch
from tunix_core.storage.control import read_heartbeat
from tunix_core.storage.store import ObjectStore, open_store


def stuck_engine(config: RunConfig, first: Any, version: int, tokenizer: Any) -> Any:
    """Every swap gives it the weights that it has."""
    engine: Any = make_engine(config, first, version, tokenizer, process="actor-0-0", log=lambda _line: None)
    swap = engine.swap
    engine.swap = lambda _weights, version: swap(first, version)
    return engine


def until_version_one(learner: ScriptedLearner) -> bool:
    if learner.trajectories:
        learner.publish(1, 1)
    return sum(row.policy_version_min == 1 for row in learner.trajectories) >= 12


def learners_view(store: ObjectStore, learner: ScriptedLearner) -> tuple[dict[str, float], list[str]]:
    """What the step at clock 1, with the true weights of version 1, makes of the trajectories that say they are of it."""
    key = store.list_after("trajectories/")[0]
    groups = []
    for name, members in learner.groups().items():
        own = [row for row in members if row.policy_version_min == row.policy_version_max == 1]
        if len(own) >= 2:
            rows = make_rows(key, own)
            size = rows.num_bytes
            groups.append(Group(group_id=name, rows=rows, advantages=rows.rewards, arrival=0, num_bytes=size))
    batch = assemble(groups[:3], 1, window_sizes(CONFIG), CONFIG)
    arrays = objectives.Batch(**{name: getattr(batch.arrays, name) for name in objectives.Batch._fields})
    objective = jax.jit(objectives.policy_objective(MODEL, CONFIG.algorithm).__call__)
    _, sums = objective(weights(1), weights(0), arrays, batch.denominator[0])
    lines: list[str] = []
    values = {name: float(value) for name, value in objectives.finalize(sums).items()}
    return GapWatch(CONFIG.observability.max_logprob_gap, lines.append).look(batch, values), lines


def test_the_gap_rises_and_an_alarm_names_actor_and_version(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "healthy"))
    learner, _ = run_actor(store, until_version_one)
    healthy, lines = learners_view(store, learner)
    assert healthy["equal_version_tokens"] > 50
    assert healthy["logprob_gap_equal_version"] < 1e-4
    assert healthy["max_actor_logprob_gap"] < 1e-4
    assert healthy["logprob_gap_alarms"] == 0
    assert lines == []

    store = open_store(str(tmp_path / "stuck"))
    learner, _ = run_actor(store, until_version_one, make_engine=stuck_engine)
    stuck, lines = learners_view(store, learner)
    assert stuck["logprob_gap_equal_version"] > 0.5
    assert stuck["max_actor_logprob_gap"] == pytest.approx(stuck["logprob_gap_equal_version"], rel=1e-4)
    assert stuck["logprob_gap_alarms"] == 1
    (line,) = lines
    assert "actor_0_0" in line
    assert "version 1" in line


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_server_that_reports_success_is_not_believed(
    tmp_path: Path, policy_server: ServerProcess, dialect: str
) -> None:
    """Its tokens go on to count as what they are, and the actor says that the version did not arrive."""
    policy_server.faults(idle_reload=False)
    alarmed = 0

    def script(learner: ScriptedLearner) -> bool:
        nonlocal alarmed
        if learner.trajectories and learner.newest == 0:
            policy_server.faults(idle_reload=True)
            learner.publish(1, 1)
        beat = read_heartbeat(learner.store, "actor-0-0")
        if beat is not None and beat.progress["num_alarms"] and not alarmed:
            alarmed = len(learner.trajectories)
        return bool(alarmed) and len(learner.trajectories) > alarmed + 8

    lines: list[str] = []
    store = open_store(str(tmp_path / "run"))
    config = served(policy_server, tmp_path, dialect=dialect)
    learner, actor = run_actor(store, script, config=config, log=lines.append)
    assert {row.policy_version_max for row in learner.trajectories} == {0}
    progress = actor.progress()
    assert progress["num_alarms"] == 1
    assert "policy version 1" in progress["alarms"][0]
    assert any("ALARM actor-0-0" in line for line in lines)

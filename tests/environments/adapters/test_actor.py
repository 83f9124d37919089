"""A real actor generates episodes of other packages' environments, and its rows say what happened in them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tunix_core.environment_config import EnvironmentConfig, GymnasiumOptions, ReasoningGymOptions, Table

pytest.importorskip("jax", reason="an actor needs the extra actor")

from tests.actor import scripted, support
from tests.actor.scripted import CONFIG, ScriptedLearner, run_actor
from tunix_core.config import WarmStartConfig
from tunix_core.environments import task_seed
from tunix_core.storage.store import open_store
from tunix_core.tokenizer import ByteTokenizer
from tunix_core.types import Trajectory

CASES = {
    "reasoning_gym": ("reasoning_gym", ReasoningGymOptions(answer="message", datasets=Table(gcd=1.0))),
    "gymnasium": ("gymnasium", GymnasiumOptions(env_id="Blackjack-v1", action="number")),
}


def _weights(seed: int) -> Any:
    """A policy whose messages are mostly of the digits 0 and 1, so that many are actions and some are right."""
    params = support.weights(seed)
    params["head"][0, [ord("0"), ord("1"), ByteTokenizer.END_OF_TURN]] = 4.0
    return params


@pytest.mark.parametrize("name", CASES)
def test_an_actor_plays_it(tmp_path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    package, options = CASES[name]
    pytest.importorskip(package, reason="its extra is not installed")
    # No environments of the test's own: the actor makes those that its configuration names.
    monkeypatch.setattr(scripted, "environments", lambda _fault: None)
    monkeypatch.setattr(scripted, "weights", _weights)
    environment = EnvironmentConfig(
        name=name, options=options, num_tasks=64, timeout_seconds=30, latency_mean_seconds=0.0
    )
    config = dataclasses.replace(
        CONFIG,
        environment=environment,
        warm_start=WarmStartConfig(num_steps=0),
        learner=dataclasses.replace(CONFIG.learner, window_tokens=192),
        actor=dataclasses.replace(CONFIG.actor, context_tokens=192, prefill_tokens=64),
    )

    def enough(learner: ScriptedLearner) -> bool:
        num_groups, rows = len(learner.groups()), learner.trajectories
        return num_groups >= 40 or (num_groups >= 4 and any(row.reward for row in rows) and any(map(_malformed, rows)))

    learner, actor = run_actor(open_store(str(tmp_path)), enough, config=config)
    assert actor.progress()["failures"] == {}
    assert actor.progress()["compilations_after_warmup"] == 0
    for group_id, members in learner.groups().items():
        assert len(members) == config.algorithm.group_size
        assert {row.task_seed for row in members} == {task_seed("train", int(group_id.split("-")[1]), config.seed)}
        assert len({json.loads(row.messages)[0]["content"] for row in members}) == 1, "one task per group"
        for row in members:
            _check(row, name)
    rows = learner.trajectories
    assert any(row.reward for row in rows)
    assert any(map(_malformed, rows))
    assert len({row.reward for row in rows}) > 1


def _malformed(row: Trajectory) -> float:
    """How many messages; a row whose first one ran out of room has no components, for the environment never read it."""
    return row.reward_components.get("malformed_calls", 0.0)


def _check(row: Trajectory, name: str) -> None:
    """Rewards of the messages add up to the row's and to the environment's own account."""
    policy = [turn for turn in row.turns if turn.role == "policy"]
    messages = [message["content"] for message in json.loads(row.messages) if message["role"] == "policy"]
    assert row.environment == name
    assert row.loss_mask.sum() == sum(turn.end - turn.start for turn in policy)
    assert row.reward == pytest.approx(sum(turn.reward for turn in policy))
    if row.finish_reason != "completed":
        return
    if name == "reasoning_gym":
        assert _malformed(row) + 1 == len(messages)
        assert row.reward_components["answer"] == pytest.approx(row.reward)
    else:
        assert row.reward_components["return"] == row.reward
        assert row.reward_components["actions"] + _malformed(row) == len(messages)

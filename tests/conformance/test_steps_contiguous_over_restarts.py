"""Step counter incremented twice on resume (verl #7933)."""

from pathlib import Path

import pytest

from tests.learner.support import consumed_ids, make_config, make_learner, open_run, write_shards
from tunix_core.errors import Fenced
from tunix_core.storage.control import read_learner_signal
from tunix_core.storage.metrics_files import read_metrics
from tunix_core.storage.step_records import read_steps, write_step


class Killed(BaseException):
    """Ends a learner where it stands: nothing is flushed."""


def test_steps_contiguous_over_restarts(tmp_path: Path) -> None:
    """Three restarts, of which two have steps to execute again; then a second learner at the same clock."""
    store = open_run(tmp_path)
    write_shards(store, 24)
    config = make_config(**{"learner.num_steps": 10, "staleness.max_staleness": 12, "checkpoint.interval_steps": 4})
    clocks: list[int] = []
    for life, last in enumerate((3, 5, 7)):
        learner = make_learner(store, config, incarnation=f"l{life}")

        def guard(_, learner=learner, last=last) -> None:
            clocks.append(learner.clock)
            if learner.clock == last:
                raise Killed

        learner._guard = guard  # type: ignore[method-assign]  # dies right after a step, before the next
        with pytest.raises(Killed):
            learner.run()
        learner._checkpoints.finish()
    final = make_learner(store, config, incarnation="l3")
    final.run()
    records = read_steps(store, 0)
    assert [r["clock"] for r in records] == list(range(1, 11))
    refs = consumed_ids(records)
    assert len(refs) == len(set(refs)) == 10 * 4
    rows = read_metrics(store, "learner")
    assert rows["clock"].max() == 10
    assert final.clock == 10
    assert read_learner_signal(store).clock == 10
    # within one life the clock only rises, and a life begins at most where the one before it died
    assert clocks[:3] == [1, 2, 3]
    ledger = final.progress()["ledger_trajectories"]
    assert ledger["consumed"] == 40
    assert ledger["read"] == 48


def test_a_zombie_exits(tmp_path: Path) -> None:
    """Another learner went on while this one hung: its record is there first."""
    store = open_run(tmp_path)
    write_shards(store, 16)
    zombie = make_learner(store, make_config(**{"learner.num_steps": 8}), incarnation="l0")
    original = zombie._step

    def overtaken(*args) -> None:
        original(*args)
        if zombie.clock == 2:
            write_step(store, 5, {"incarnation": "l1", "groups": []})

    zombie._step = overtaken  # type: ignore[method-assign]
    with pytest.raises(Fenced, match="written by l1"):
        zombie.run()
    assert zombie.clock == 4
    assert Fenced.exit_code == 70

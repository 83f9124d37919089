"""Restored buffer already complete, nothing stepped (NeMo-RL #3066)."""

import pytest

from tests.learner.support import make_config, make_learner, open_run, write_shards
from tunix_core.storage.checkpoints import CheckpointStore


class Killed(BaseException):
    """Ends a learner where it stands."""


@pytest.mark.timeout(60)
def test_full_buffer_restores_without_deadlock(tmp_path) -> None:
    """All that is left to train on is in the restored buffer and no shard comes any more: it steps to the end."""
    config = make_config(**{"learner.num_steps": 9, "staleness.max_staleness": 12, "checkpoint.interval_steps": 3})
    store = open_run(tmp_path)
    write_shards(store, 18)
    learner = make_learner(store, config, incarnation="first")
    step = learner._step

    def die(*arguments) -> None:
        if learner.clock >= 3:
            raise Killed
        step(*arguments)

    learner._step = die  # type: ignore[method-assign]  # where a SIGKILL might strike
    with pytest.raises(Killed):
        learner.run()
    learner._checkpoints.finish()
    (clock,) = CheckpointStore(store).clocks()
    assert CheckpointStore(store).metadata(clock)["num_buffered_groups"] >= 10

    last = make_learner(store, config, incarnation="last")
    last.run()
    assert last.clock == 9

"""Restored buffer already complete, nothing stepped (NeMo-RL #3066)."""

import pytest

from tests.learner.support import make_config, make_learner, open_run, run_killed, write_shards
from tunix_core.storage.checkpoints import CheckpointStore


@pytest.mark.timeout(60)
def test_full_buffer_restores_without_deadlock(tmp_path) -> None:
    """All that is left to train on is in the restored buffer and no shard comes any more: it steps to the end."""
    config = make_config(**{"learner.num_steps": 9, "staleness.max_staleness": 12, "checkpoint.interval_steps": 3})
    store = open_run(tmp_path)
    write_shards(store, 18)
    run_killed(store, config, where="_step", clock=3, incarnation="first")
    (clock,) = CheckpointStore(store).clocks()
    assert CheckpointStore(store).metadata(clock)["num_buffered_groups"] >= 10

    last = make_learner(store, config, incarnation="last")
    last.run()
    assert last.clock == 9

"""Retention deleted weights before they were loaded, or the only checkpoint (prime-rl #1857, #1299).

Here: slow readers of a policy, a checkpoint and shards are in the middle of reading, in processes of their own as far as the
store can tell, while cleanup with keep = 1 and no grace runs after each of their requests. Nothing that they hold disappears; once they
are done, it does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_retention import LATER, checkpoint, publish
from tests.storage.test_compaction import check_all, contents, write
from tests.support.stores import ScriptedStore
from tunix_core import paths
from tunix_core.config_loading import load_recipe
from tunix_core.data.retention import Retention
from tunix_core.data.upkeep import Upkeep
from tunix_core.errors import ObjectMissing
from tunix_core.retention_config import RetentionConfig
from tunix_core.storage.checkpoints import CheckpointStore
from tunix_core.storage.leases import leased
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.shard_archive import ShardArchive
from tunix_core.storage.store import ObjectStore, open_store


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "run"))


LONG = 1e9
"""The shards are of next year, and so is cleanup's clock."""


class Cleanup:
    """All that deletes, with the least that it may keep."""

    def __init__(self, store: ObjectStore) -> None:
        settings = RetentionConfig(keep_policies=1, keep_snapshots=1, grace_seconds=0)
        config = load_recipe("lookup", {"checkpoint.keep": 1, "checkpoint.grace_seconds": 0.0})
        self._retention = Retention(store, settings, owner="checkpoint", clock=lambda: LATER)
        self._upkeep = Upkeep(store, config, process="checkpoint")
        self.num_runs = 0

    def __call__(self) -> None:
        self._upkeep.tend()
        self._retention.tend()
        self.num_runs += 1

    def during(self, store: ObjectStore) -> Any:
        """The store as a slow reader has it."""
        slow = ScriptedStore(store)

        def clean_up(_verb: str, _key: str) -> str:
            self()
            return "pass"

        slow.script = clean_up
        return slow


def test_a_policy_that_is_being_loaded_stays(store: ObjectStore) -> None:
    publish(store, range(4))
    cleanup = Cleanup(store)
    chosen = PolicyStore(store).current()
    assert chosen is not None
    with leased(store, [paths.policy(chosen.version)], reader="actor-0", seconds=LONG):
        PolicyStore(store).publish(9, {"w": np.full(3, 9, np.float32)}, config={}, parent=2, publisher="sync", gate={})
        slow = cleanup.during(store)
        tensors, _ = PolicyStore(slow).load(chosen.version)
        assert tensors["w"].tolist() == [chosen.version] * 3
        assert cleanup.num_runs >= 2
    cleanup()
    assert PolicyStore(store).versions() == [0, 9]
    with pytest.raises(ObjectMissing), leased(store, [paths.policy(chosen.version)], reader="late"):
        PolicyStore(store).load(chosen.version)


def test_a_checkpoint_that_is_being_restored_stays_and_the_last_one_always(store: ObjectStore, tmp_path: Path) -> None:
    checkpoint(store, tmp_path, 4, {})
    cleanup = Cleanup(store)
    cleanup()
    assert CheckpointStore(store).clocks() == [4], "the only one"
    with leased(store, [paths.checkpoint(4)], reader="restore-0", seconds=LONG):
        checkpoint(store, tmp_path, 8, {})
        slow = cleanup.during(store)
        CheckpointStore(slow).download(4, tmp_path / "restored")
        assert (tmp_path / "restored/host-00000/buffer.json").is_file()
        assert cleanup.num_runs >= 3
    cleanup()
    assert not store.list_after(paths.checkpoint(4))
    assert CheckpointStore(store).clocks() == [8]


def test_an_unreadable_checkpoint_does_not_push_out_the_good_one(store: ObjectStore, tmp_path: Path) -> None:
    checkpoint(store, tmp_path, 4, {})
    checkpoint(store, tmp_path, 8, {})
    (key,) = [key for key in store.list_after(paths.checkpoint(8)) if key.endswith("buffer.json")]
    store.put(key, b"{}")
    cleanup = Cleanup(store)
    cleanup()
    cleanup()
    assert CheckpointStore(store).verify(4) > 0


def test_shards_that_are_being_read_stay_or_are_found_again(store: ObjectStore, tmp_path: Path) -> None:
    _, shards = write(store)
    checkpoint(store, tmp_path, 4, {"inc0": 5, "inc1": 5})
    cleanup = Cleanup(store)
    with leased(store, [paths.TRAJECTORIES], reader="notebook", seconds=LONG):
        cleanup()
        assert all(store.exists(key) for key in shards), "somebody reads them by their names"
    keys = ShardArchive(store).keys()
    found = contents(cleanup.during(store), keys)
    assert found.keys() == shards.keys()
    assert not any(store.exists(key) for key in shards), "they went meanwhile"
    check_all(store, shards)

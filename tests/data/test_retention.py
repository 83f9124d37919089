"""What may go, and what is referred to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.storage.test_compaction import check_all, contents, write
from tests.storage.test_trajectory_writer import HOUR, START
from tunix_core import paths
from tunix_core.data.retention import Retention, read_pins
from tunix_core.errors import ConfigError, CorruptObject
from tunix_core.retention_config import RetentionConfig
from tunix_core.storage.checkpoints import CheckpointStore
from tunix_core.storage.memory_store import MemoryStore
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.shard_archive import read_compacted
from tunix_core.storage.snapshots import SnapshotStore
from tunix_core.storage.step_records import write_step
from tunix_core.storage.store import ObjectStore

LATER = START + 5 * HOUR


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> ObjectStore:
    return MemoryStore(f"retention-{request.node.name[:60].replace('[', '-').rstrip(']')}")


def tend(store: ObjectStore, **fields: Any) -> Retention:
    retention = Retention(
        store, RetentionConfig(**{"grace_seconds": 0, **fields}), owner="checkpoint", clock=lambda: LATER
    )
    retention.tend()
    return retention


def checkpoint(
    store: ObjectStore, folder: Path, clock: int, cursors: dict[str, int], groups: tuple[str, ...] = ()
) -> None:
    """As the learner's: the buffer's state lies in a file of the host that leads the feed."""
    source = folder / f"checkpoint-{clock}"
    (source / "host-00000").mkdir(parents=True)
    buffer = {
        "cursors": {
            "format": 1,
            "cursors": {name: {"next_sequence": n, "closed": n == 5} for name, n in cursors.items()},
        },
        "groups": [{"shard": shard} for shard in groups],
        "replayed": [],
    }
    (source / "host-00000/buffer.json").write_text(json.dumps(buffer))
    CheckpointStore(store).upload(clock, source, metadata={"feeds": [0]}, incarnation="l0")


def test_without_a_checkpoint_all_shards_are_needed(memory: ObjectStore) -> None:
    hour, shards = write(memory)
    tend(memory)
    assert read_compacted(memory, hour) is None
    assert read_pins(memory).holds(next(iter(shards)))


def test_shards_that_were_read_by_all_checkpoints_are_put_together(memory: ObjectStore, tmp_path: Path) -> None:
    hour, shards = write(memory)
    checkpoint(memory, tmp_path, 4, {"inc0": 5, "inc1": 5})
    assert tend(memory, compact=False).num_compacted_hours == 0
    retention = tend(memory)
    assert (retention.num_compacted_hours, retention.num_deleted_shards) == (1, 10)
    found = read_compacted(memory, hour)
    assert found is not None
    assert found.shards.keys() == shards.keys()
    check_all(memory, shards)


@pytest.mark.parametrize("why", ["older cursor", "unknown writer", "buffer", "step record"])
def test_what_a_learner_may_go_on_from_stays(memory: ObjectStore, tmp_path: Path, why: str) -> None:
    hour, shards = write(memory)
    last = max(shards)
    old = {"older cursor": {"inc0": 5, "inc1": 4}, "unknown writer": {"inc0": 5}}.get(why, {"inc0": 5, "inc1": 5})
    checkpoint(memory, tmp_path, 4, old, groups=(last,) if why == "buffer" else ())
    checkpoint(memory, tmp_path, 8, {"inc0": 5, "inc1": 5})
    for clock in range(1, 9):
        group = {"shard": last if why == "step record" and clock == 5 else min(shards)}
        write_step(memory, clock, {"groups": [group] if clock == 5 and why == "step record" else []})
    retention = Retention(memory, RetentionConfig(grace_seconds=0), owner="checkpoint", clock=lambda: LATER)
    assert "pinned" in retention.compactable()[hour]
    assert "inc1" in retention.compactable()[hour]
    retention.tend()
    assert all(memory.exists(key) for key in shards)

    CheckpointStore(memory).retire(4, reason="older")
    retention.tend()
    assert all(memory.exists(key) for key in shards), "a retired one may still be restored"
    assert CheckpointStore(memory).delete_retired(grace_seconds=0) == [4]
    retention.tend()
    assert not any(memory.exists(key) for key in shards)
    check_all(memory, shards)


def test_a_checkpoint_that_comes_between_compaction_and_deletion_is_seen(memory: ObjectStore, tmp_path: Path) -> None:
    _, shards = write(memory)
    checkpoint(memory, tmp_path, 4, {"inc0": 5, "inc1": 5})
    tend(memory, grace_seconds=60)
    checkpoint(memory, tmp_path, 2, {"inc0": 1, "inc1": 5})  # a person restored an older state
    later = Retention(memory, RetentionConfig(grace_seconds=60), owner="checkpoint", clock=lambda: LATER + 61)
    later.tend()
    assert all(memory.exists(key) for key in shards)
    check_all(memory, shards)


def test_a_run_that_has_its_report_needs_none_of_them(memory: ObjectStore) -> None:
    _, shards = write(memory)
    memory.put(paths.REPORTS + "summary.json", b"{}")
    assert tend(memory).num_deleted_shards == len(shards)
    check_all(memory, shards)


def test_a_checkpoint_that_says_nothing_stops_it(memory: ObjectStore, tmp_path: Path) -> None:
    write(memory)
    (tmp_path / "file").write_bytes(b"x")
    CheckpointStore(memory).upload(4, tmp_path, metadata={}, incarnation="l0")
    with pytest.raises(CorruptObject, match="checkpoint 4"):
        tend(memory)


def test_a_broken_file_is_reported_and_its_shards_stay(memory: ObjectStore, tmp_path: Path) -> None:
    hour, shards = write(memory)
    checkpoint(memory, tmp_path, 4, {"inc0": 5, "inc1": 5})
    tend(memory, grace_seconds=60)
    found = read_compacted(memory, hour)
    assert found is not None
    (entry,) = found.files.values()
    memory.put(entry.key, b"PAR1")
    later = Retention(memory, RetentionConfig(grace_seconds=60), owner="checkpoint", clock=lambda: LATER + 61)
    later.tend()
    assert "sha256" in later.progress()["broken_hours"][hour]
    assert all(memory.exists(key) for key in shards)


def publish(store: ObjectStore, versions: range) -> None:
    import numpy as np

    for version in versions:
        tensors = {"w": np.full(3, version, np.float32)}
        SnapshotStore(store).write(version, tensors, incarnation="l0")
        if version < versions.stop - 1:
            PolicyStore(store).publish(version, tensors, config={}, parent=None, publisher="sync", gate={})


def test_weights_go_by_number_but_what_is_referred_to_stays(memory: ObjectStore) -> None:
    publish(memory, range(8))
    tend(memory)
    assert PolicyStore(memory).versions() == SnapshotStore(memory).versions()[:-1] == list(range(7)), "kept by default"
    retention = tend(memory, keep_policies=2, keep_snapshots=1)
    assert PolicyStore(memory).versions() == [0, 5, 6], "version 0 is the reference"
    assert SnapshotStore(memory).versions() == [6, 7], "7 waits to be published"
    assert retention.progress()["num_deleted_policies"] == 4
    current = PolicyStore(memory).current()
    assert current is not None
    assert PolicyStore(memory).load(current.version)[0]["w"].tolist() == [6, 6, 6]


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match=r"retention\.keep_policies"):
        RetentionConfig(keep_policies=-1)
    with pytest.raises(ConfigError, match=r"retention\.target_file_bytes"):
        RetentionConfig(target_file_bytes=0)


def test_nothing_counts_twice_before_the_shards_go(memory: ObjectStore, tmp_path: Path) -> None:
    _, shards = write(memory)
    checkpoint(memory, tmp_path, 4, {"inc0": 5, "inc1": 5})
    tend(memory, grace_seconds=60)
    assert all(memory.exists(key) for key in shards)
    assert sum(map(len, contents(memory).values())) == sum(map(len, shards.values()))

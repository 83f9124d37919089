from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stores import ScriptedStore
from tunix_core import paths
from tunix_core.errors import CorruptObject, DataError, ObjectMissing, StoreError
from tunix_core.storage.checkpoints import CheckpointStore
from tunix_core.storage.store import ObjectStore, write_json

FILES = {
    "_METADATA": b"{}",
    "params/.zarray": b"dotted",
    "params/d/0": bytes(range(256)) * 10,
    "empty": b"",
    "ocdbt.process_0/manifest.ocdbt": b"m",
}


@pytest.fixture
def local_dir(tmp_path: Path) -> Path:
    root = tmp_path / "orbax"
    for name, data in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_directory_comes_back_as_it_was(store: ObjectStore, local_dir: Path, tmp_path: Path) -> None:
    checkpoints = CheckpointStore(store)
    assert checkpoints.clocks() == []
    metadata = {"cursors": {"inc0": 3}, "ledger": {"read": 10}}
    checkpoints.upload(20, local_dir, metadata=metadata, incarnation="inc0")
    assert checkpoints.clocks() == [20]
    assert checkpoints.verify(20) == sum(map(len, FILES.values()))
    assert checkpoints.metadata(20) == metadata
    assert checkpoints.download(20, tmp_path / "restored") == metadata
    assert contents(tmp_path / "restored") == FILES
    with pytest.raises(ObjectMissing):
        checkpoints.download(10, tmp_path / "none")


def test_the_first_complete_upload_of_a_clock_stays(memory: ObjectStore, local_dir: Path) -> None:
    checkpoints = CheckpointStore(memory)
    checkpoints.upload(20, local_dir, metadata={"by": 0}, incarnation="inc0")
    checkpoints.upload(20, local_dir, metadata={"by": 1}, incarnation="inc1")
    assert checkpoints.metadata(20) == {"by": 0}


def test_an_upload_that_died_leaves_no_checkpoint(memory: ObjectStore, local_dir: Path, tmp_path: Path) -> None:
    for num_writes in range(len(FILES) + 1):
        dying = ScriptedStore(memory)
        counted = iter(range(100))
        dying.script = lambda verb, _key, n=num_writes, c=counted: (
            "fail" if verb.startswith("put") and next(c) >= n else "pass"
        )
        with pytest.raises(StoreError):
            CheckpointStore(dying).upload(20, local_dir, metadata={}, incarnation="inc0")
        assert CheckpointStore(memory).clocks() == []
    CheckpointStore(memory).upload(20, local_dir, metadata={}, incarnation="inc1")
    CheckpointStore(memory).download(20, tmp_path / "restored")
    assert contents(tmp_path / "restored") == FILES


def test_nothing_to_upload_is_an_error(memory: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no files"):
        CheckpointStore(memory).upload(1, tmp_path / "absent", metadata={}, incarnation="inc0")
    assert CheckpointStore(memory).clocks() == []


def test_damage_is_found(memory: ObjectStore, local_dir: Path, tmp_path: Path) -> None:
    checkpoints = CheckpointStore(memory)
    checkpoints.upload(20, local_dir, metadata={}, incarnation="inc0")
    key = checkpoints.manifest(20)["files"]["params/d/0"]["key"]
    memory.put(key, memory.get(key)[:-1] + b"?")
    for act in (lambda: checkpoints.verify(20), lambda: checkpoints.download(20, tmp_path / "restored")):
        with pytest.raises(CorruptObject, match="params/d/0"):
            act()


@pytest.mark.parametrize("name", ["../escape", "/absolute", "a/../../b"])
def test_no_name_leads_out_of_the_directory(memory: ObjectStore, local_dir: Path, tmp_path: Path, name: str) -> None:
    checkpoints = CheckpointStore(memory)
    checkpoints.upload(20, local_dir, metadata={}, incarnation="inc0")
    manifest = checkpoints.manifest(20)
    manifest["files"][name] = manifest["files"].pop("_METADATA")
    write_json(memory, paths.checkpoint(20) + paths.MANIFEST, manifest)
    with pytest.raises(CorruptObject, match="leads out"):
        checkpoints.download(20, tmp_path / "a" / "restored")
    assert not (tmp_path / "a" / "escape").exists()


def test_deletion_has_two_phases(store: ObjectStore, local_dir: Path, tmp_path: Path) -> None:
    checkpoints = CheckpointStore(store)
    for clock in (10, 20, 30):
        checkpoints.upload(clock, local_dir, metadata={}, incarnation="inc0")
    checkpoints.retire(10, reason="newer ones exist")
    checkpoints.retire(20, reason="newer ones exist")
    first = checkpoints.retired()
    checkpoints.retire(10, reason="again")
    assert checkpoints.retired() == first
    assert checkpoints.clocks() == [30]
    checkpoints.download(10, tmp_path / "slow-reader")  # who chose it before still gets it
    now = max(first.values())
    assert checkpoints.delete_retired(grace_seconds=60, clock=lambda: now + 30) == []
    assert checkpoints.delete_retired(grace_seconds=60, clock=lambda: now + 61, protected={20}) == [10]
    assert store.list_after(paths.checkpoint(10)) == []
    assert checkpoints.verify(20) > 0
    assert checkpoints.delete_retired(grace_seconds=60, clock=lambda: now + 61) == [20]
    assert checkpoints.clocks() == [30]
    assert checkpoints.retired() == {}


def test_the_last_way_back_is_not_deleted(memory: ObjectStore, local_dir: Path) -> None:
    checkpoints = CheckpointStore(memory)
    checkpoints.upload(10, local_dir, metadata={}, incarnation="inc0")
    checkpoints.retire(10, reason="mistake")
    assert checkpoints.delete_retired(grace_seconds=0) == []
    assert checkpoints.verify(10) > 0


def test_a_deletion_that_died_is_finished(memory: ObjectStore, local_dir: Path) -> None:
    CheckpointStore(memory).upload(10, local_dir, metadata={}, incarnation="inc0")
    CheckpointStore(memory).upload(20, local_dir, metadata={}, incarnation="inc0")
    CheckpointStore(memory).retire(10, reason="old")
    for num_deletes in range(len(FILES) + 2):
        dying = ScriptedStore(memory)
        counted = iter(range(100))
        dying.script = lambda verb, _key, n=num_deletes, c=counted: (
            "fail" if verb == "delete" and next(c) >= n else "pass"
        )
        try:
            CheckpointStore(dying).delete_retired(grace_seconds=0)
        except StoreError:
            assert CheckpointStore(memory).clocks() == [20]
    assert CheckpointStore(memory).delete_retired(grace_seconds=0) in ([], [10])
    assert memory.list_after(paths.checkpoint(10)) == []

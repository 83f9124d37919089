from pathlib import Path

import pytest

from tunix_core import paths
from tunix_core.config_loading import load_recipe
from tunix_core.data.upkeep import Upkeep
from tunix_core.storage.checkpoints import CheckpointStore
from tunix_core.storage.store import ObjectStore, open_store


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "run"))


def save(store: ObjectStore, folder: Path, *clocks: int) -> None:
    for clock in clocks:
        source = folder / f"c{clock}"
        source.mkdir()
        (source / "state").write_bytes(bytes([clock]) * 100)
        CheckpointStore(store).upload(clock, source, metadata={}, incarnation="l0")


def spoil(store: ObjectStore, clock: int) -> None:
    (key,) = [k for k in store.list_after(paths.checkpoint(clock)) if k.endswith("state")]
    store.put(key, b"spoiled")


def make_upkeep(store: ObjectStore, *, keep: int = 2, grace_seconds: float = 0.0) -> Upkeep:
    config = load_recipe("lookup", {"checkpoint.keep": keep, "checkpoint.grace_seconds": grace_seconds})
    return Upkeep(store, config, process="checkpoint")


def test_the_newest_verified_stay(store: ObjectStore, tmp_path: Path) -> None:
    save(store, tmp_path, 2, 4, 6, 8)
    upkeep = make_upkeep(store)
    upkeep.tend()
    assert CheckpointStore(store).clocks() == [6, 8]
    assert upkeep.num_deleted == 2
    assert store.list_after(paths.checkpoint(2)) == []
    assert [row["ok"] for row in upkeep.recorder.drain()] == [1, 1, 1, 1]


def test_a_broken_one_does_not_count_and_goes_once_a_newer_good_one_exists(store: ObjectStore, tmp_path: Path) -> None:
    save(store, tmp_path, 2, 4, 6)
    spoil(store, 6)
    upkeep = make_upkeep(store)
    upkeep.tend()
    assert upkeep.retained == [2, 4]
    assert CheckpointStore(store).clocks() == [2, 4, 6]
    save(store, tmp_path, 8)
    upkeep.tend()
    assert CheckpointStore(store).clocks() == [4, 8]


def test_without_a_verified_one_nothing_is_deleted(store: ObjectStore, tmp_path: Path) -> None:
    save(store, tmp_path, 2, 4)
    CheckpointStore(store).retire(2, reason="by hand")
    spoil(store, 4)
    make_upkeep(store, keep=1).tend()
    assert store.list_after(paths.checkpoint(2))
    assert store.list_after(paths.checkpoint(4))


def test_the_grace_is_kept(store: ObjectStore, tmp_path: Path) -> None:
    save(store, tmp_path, 2, 4)
    upkeep = make_upkeep(store, keep=1, grace_seconds=3600)
    upkeep.tend()
    assert CheckpointStore(store).clocks() == [4]
    assert CheckpointStore(store).verify(2) == 100, "a reader that chose it may finish"

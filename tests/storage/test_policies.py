from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.stores import ScriptedStore
from tunix_core import paths
from tunix_core.errors import CorruptObject, DataError, ObjectExists, ObjectMissing, StoreError, VersionConflict
from tunix_core.storage import multifile
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.snapshots import SnapshotStore
from tunix_core.storage.store import ObjectStore, read_json, write_json


def weights(value: float) -> dict[str, np.ndarray]:
    return {"layers.w": np.full((2, 3), value, np.float32), "bias": np.arange(3, dtype=np.float32) + value}


def publish(store: ObjectStore, version: int, publisher: str = "sync_weights", **changes) -> dict:
    options = {"config": {"model_width": 8}, "parent": None, "gate": {"distance": 0.1}, **changes}
    return PolicyStore(store).publish(version, weights(version), publisher=publisher, **options)


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def test_publish_and_load(store: ObjectStore) -> None:
    policies = PolicyStore(store)
    assert policies.current() is None
    assert policies.versions() == []
    publish(store, 0)
    manifest = publish(store, 3, parent=0, restored_from=1)
    current = policies.current()
    assert current is not None
    assert (current.version, current.manifest) == (3, "policies/00000003/MANIFEST.json")
    tensors, loaded = policies.load(3)
    assert same(tensors, weights(3))
    assert loaded == policies.manifest(3) == manifest
    assert (loaded["parent"], loaded["restored_from"], loaded["gate"]) == (0, 1, {"distance": 0.1})
    assert policies.config(3) == {"model_width": 8}
    assert policies.versions() == [0, 3]
    assert policies.versions(0) == [3]
    assert policies.versions(3) == []
    with pytest.raises(ObjectMissing):
        policies.load(2)


def test_the_pointer_only_rises(memory: ObjectStore) -> None:
    publish(memory, 5)
    with pytest.raises(VersionConflict, match="received 4, accepted above the current 5"):
        publish(memory, 4)
    assert PolicyStore(memory).versions() == [5]
    with pytest.raises(ObjectExists):
        publish(memory, 5)
    current = PolicyStore(memory).current()
    assert current is not None
    assert current.version == 5


def test_a_lower_version_that_was_under_way_does_not_pull_the_pointer_back(memory: ObjectStore) -> None:
    slow = ScriptedStore(memory)

    def overtake(verb: str, key: str) -> str:
        if verb == "put_if_absent" and key.endswith(paths.MANIFEST):
            slow.script = lambda _verb, _key: "pass"
            publish(memory, 2)
        return "pass"

    slow.script = overtake
    publish(slow, 1)
    current = PolicyStore(memory).current()
    assert current is not None
    assert current.version == 2
    assert PolicyStore(memory).versions() == [1, 2]


@pytest.mark.parametrize("num_writes", range(4))
def test_a_publisher_that_dies_is_followed_by_another(memory: ObjectStore, num_writes: int) -> None:
    """After any number of its writes: weights, config, manifest, pointer."""
    publish(memory, 0)
    dying = ScriptedStore(memory)
    counted = iter(range(100))
    dying.script = lambda verb, _key: "fail" if verb.startswith("put") and next(counted) >= num_writes else "pass"
    with pytest.raises(StoreError):
        publish(dying, 1, "first")
    before = PolicyStore(memory).current()
    assert before is not None
    assert before.version == 0
    if num_writes == 3:  # complete, but nobody pointed to it
        with pytest.raises(ObjectExists):
            publish(memory, 1, "second")
    else:
        publish(memory, 1, "second")
    current = PolicyStore(memory).current()
    assert current is not None
    assert current.version == 1
    tensors, manifest = PolicyStore(memory).load(1)
    assert same(tensors, weights(1))
    assert manifest["publisher"] == ("first" if num_writes == 3 else "second")


def test_racing_publishers(store: ObjectStore) -> None:
    """Sixteen publish the same versions: each version has one publisher, whole, and the pointer ends highest."""
    barrier = threading.Barrier(16)

    def race(index: int) -> list[int]:
        won = []
        barrier.wait()
        for version in range(4):
            mine = {"w": np.full(50, index, np.float32)}
            try:
                PolicyStore(store).publish(version, mine, config={}, parent=None, publisher=f"p{index}", gate={})
                won.append(version)
            except (ObjectExists, VersionConflict):
                continue
        return won

    with ThreadPoolExecutor(16) as pool:
        wins = list(pool.map(race, range(16)))
    published = PolicyStore(store).versions()
    assert sorted(version for won in wins for version in won) == published
    current = PolicyStore(store).current()
    assert current is not None
    assert current.version == max(published) == 3
    for version in published:
        tensors, manifest = PolicyStore(store).load(version)
        assert version in wins[int(manifest["publisher"][1:])]
        assert tensors["w"].tolist() == [float(manifest["publisher"][1:])] * 50


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damaged_weights_are_never_loaded(memory: ObjectStore, damage: str) -> None:
    manifest = publish(memory, 0)
    key = manifest["files"][multifile.WEIGHTS]["key"]
    data = memory.get(key)
    if damage == "flip":
        memory.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "truncate":
        memory.put(key, data[:-1])
    else:
        memory.delete(key)
    with pytest.raises(CorruptObject, match=r"model\.safetensors"):
        PolicyStore(memory).load(0)
    assert SnapshotStore(memory).latest_version() is None


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"files": {multifile.WEIGHTS: {"key": "run.json", "sha256": "", "num_bytes": 0}}},
        {"files": {multifile.WEIGHTS: {"key": "policies/00000000/x"}}},
        {"files": [1]},
        {"version": 9},
        {"files": {}},
    ],
)
def test_hostile_manifests_are_refused(memory: ObjectStore, change: dict) -> None:
    manifest = publish(memory, 0)
    write_json(memory, paths.policy(0) + paths.MANIFEST, {**manifest, **change})
    with pytest.raises(CorruptObject):
        PolicyStore(memory).load(0)


def test_a_hostile_pointer_is_refused(memory: ObjectStore) -> None:
    write_json(memory, paths.CURRENT_POLICY, {"version": "x"})
    with pytest.raises(CorruptObject, match=r"CURRENT\.json"):
        PolicyStore(memory).current()


def test_weights_are_arrays(memory: ObjectStore) -> None:
    with pytest.raises(DataError, match="tensor w: received a list"):
        PolicyStore(memory).publish(0, {"w": [1.0]}, config={}, parent=None, publisher="p", gate={})  # type: ignore[dict-item]  # that is the test
    assert memory.list_after("policies/") == []


def test_tensors_round_trip() -> None:
    tensors = {
        "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "scalar": np.array(3.0, np.float64),
        "empty": np.zeros((0, 2), np.int32),
        "half": np.ones(3, np.float16),
    }
    data = multifile.encode_tensors(tensors)
    assert same(multifile.decode_tensors(data, "x"), tensors)
    assert data == multifile.encode_tensors(dict(reversed(tensors.items())))
    with pytest.raises(CorruptObject, match="snapshot 3"):
        multifile.decode_tensors(data[:-1], "snapshot 3")


def test_snapshots(store: ObjectStore) -> None:
    snapshots = SnapshotStore(store)
    assert snapshots.latest_version() is None
    for version in (0, 1, 2, 10):
        snapshots.write(version, weights(version), incarnation="inc0")
        assert snapshots.latest_version() == version
    assert same(snapshots.load(2), weights(2))
    snapshots.write(2, weights(99), incarnation="inc1")  # a recovered learner: the first stays
    assert same(snapshots.load(2), weights(2))
    assert snapshots.versions() == [0, 1, 2, 10]
    snapshots.delete(1)
    assert snapshots.versions() == [0, 2, 10]
    with pytest.raises(ObjectMissing):
        snapshots.load(1)
    assert SnapshotStore(store).latest_version() == 10


def test_the_newest_snapshot_is_found_without_listing_the_old_ones(memory: ObjectStore) -> None:
    store = ScriptedStore(memory)
    snapshots = SnapshotStore(store)
    for version in range(5):
        snapshots.write(version, weights(version), incarnation="inc0")
    assert snapshots.latest_version() == 4
    listed: list[int] = []
    inner = store.inner.list_after

    class Counting:
        def __getattr__(self, name: str):
            return getattr(memory, name)

        def list_after(self, prefix: str, after: str = "") -> list[str]:
            keys = inner(prefix, after)
            listed.append(len(keys))
            return keys

    store.inner = Counting()  # type: ignore[assignment]  # the same verbs
    assert snapshots.latest_version() == 4
    assert listed == [0]


def test_an_incomplete_snapshot_does_not_exist(memory: ObjectStore) -> None:
    store = ScriptedStore(memory)
    store.script = lambda verb, key: "fail" if key.endswith(paths.MANIFEST) and verb.startswith("put") else "pass"
    with pytest.raises(StoreError):
        SnapshotStore(store).write(3, weights(3), incarnation="inc0")
    assert memory.list_after("snapshots/") != []
    assert SnapshotStore(memory).latest_version() is None
    SnapshotStore(memory).write(3, weights(3), incarnation="inc1")
    assert same(SnapshotStore(memory).load(3), weights(3))
    assert read_json(memory, paths.snapshot(3) + paths.MANIFEST)["incarnation"] == "inc1"

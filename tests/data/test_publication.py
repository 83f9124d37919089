import threading
import tracemalloc

import numpy as np
import pytest

from tunix_core import paths
from tunix_core.config import RunConfig, SyncConfig
from tunix_core.config_loading import load_recipe
from tunix_core.data.publication import Gate, Publisher, publish_until_stopped
from tunix_core.errors import CorruptObject, Interrupted
from tunix_core.storage import tensor_files
from tunix_core.storage.control import read_heartbeat, request_stop
from tunix_core.storage.parts import Part, Parts
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.snapshots import SnapshotStore
from tunix_core.storage.store import ObjectStore, open_store, read_json

CONFIG = load_recipe("lookup", {"sync.interval_seconds": 0.05})
HALVES = (slice(0, 512), slice(512, 1024))


def weights(value: float = 1.0, **changes: np.ndarray) -> dict[str, np.ndarray]:
    return {"a": np.full((2, 3), value, np.float32), "b": np.full(4, value, np.float32)} | changes


@pytest.fixture
def store(tmp_path) -> ObjectStore:
    store = open_store(str(tmp_path))
    PolicyStore(store).publish(0, weights(), config={}, parent=None, publisher="warm_start", gate={})
    SnapshotStore(store).write(0, weights(), incarnation="w")
    return store


def snapshot(store: ObjectStore, version: int, tensors: dict[str, np.ndarray]) -> None:
    SnapshotStore(store).write(version, tensors, incarnation="l0")


def make_publisher(store: ObjectStore, config: RunConfig = CONFIG) -> Publisher:
    return Publisher(store, config, process="sync_weights")


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (weights(1.1), ""),
        (weights(b=np.array([1, np.nan, 1, 1], np.float32)), "b has a non-finite entry"),
        (weights(b=np.array([1, -np.inf, 1, 1], np.float32)), "b has a non-finite entry"),
        (weights(2000.0), "max_abs_weight 2000 above 1000"),
        (weights(1.6), "relative_change 0.6 above 0.5"),
        (weights(b=np.ones(5, np.float32)), "b has shape (5,), before (4,)"),
        ({"a": np.ones((2, 3), np.float32)}, "other tensors than before: ['b']"),
    ],
)
def test_gate(tensors: dict[str, np.ndarray], reason: str) -> None:
    gate = Gate(SyncConfig(), {name: value.shape for name, value in tensors.items()}, weights())
    for file in tensor_files.encoded(tensors):
        for box, array in file.arrays():
            gate.take(box, array)
    gate.close()
    assert gate.refusal == reason
    assert set(gate.figures) == {"max_abs_weight", "relative_change"}


def test_newest_snapshot_is_published_once(store: ObjectStore) -> None:
    snapshot(store, 1, weights(1.1))
    snapshot(store, 2, weights(1.2))
    publisher = make_publisher(store)
    assert publisher.publish_newest()
    assert not publisher.publish_newest()
    assert PolicyStore(store).versions() == [0, 2]
    tensors, manifest = PolicyStore(store).load(2)
    np.testing.assert_array_equal(tensors["a"], weights(1.2)["a"])
    assert (manifest["parent"], manifest["publisher"]) == (0, "sync_weights")
    assert manifest["gate"]["relative_change"] == pytest.approx(0.2, rel=1e-5)


def test_a_poisoned_snapshot_is_refused_for_good_and_the_next_good_one_goes_out(store: ObjectStore) -> None:
    snapshot(store, 1, weights(np.nan))
    publisher = make_publisher(store)
    assert not publisher.publish_newest()
    assert not publisher.publish_newest()
    assert publisher.num_refused == 1
    assert "non-finite" in read_json(store, paths.snapshot_refusal(1))["reason"]
    again = make_publisher(store)
    assert not again.publish_newest()
    assert again.num_refused == 0, "one refusal is counted once, also over restarts"
    snapshot(store, 2, weights(1.1))
    assert again.publish_newest()
    assert PolicyStore(store).versions() == [0, 2]


def test_a_corrupt_snapshot_is_refused(store: ObjectStore) -> None:
    snapshot(store, 1, weights(1.1))
    (key,) = [k for k in store.list_after(paths.snapshot(1)) if k.endswith("safetensors")]
    store.put(key, store.get(key)[:-1] + b"\0")
    assert not make_publisher(store).publish_newest()
    assert "unreadable" in read_json(store, paths.snapshot_refusal(1))["reason"]


def test_nothing_is_left_of_what_was_refused_half_way(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 30)
    snapshot(store, 1, weights(1.1, b=np.array([1, np.nan, 1, 1], np.float32)))
    assert len(tensor_files.boxes(SnapshotStore(store).manifest(1))) == 2
    before = store.list_after("policies/")
    assert not make_publisher(store).publish_newest()
    assert store.list_after("policies/") == before


def test_a_damaged_policy_before_is_no_fault_of_the_snapshot(store: ObjectStore) -> None:
    snapshot(store, 1, weights(1.1))
    (key,) = [k for k in store.list_after(paths.policy(0)) if k.endswith("safetensors")]
    store.put(key, store.get(key)[:-1] + b"\0")
    with pytest.raises(CorruptObject):
        make_publisher(store).publish_newest()
    assert not store.exists(paths.snapshot_refusal(1))


def test_a_model_larger_than_the_publisher(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 MB of weights, of two learner hosts, in files of at most 1 MB: no more than a few files are in memory at a time."""
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 2**20)
    monkeypatch.setattr(tensor_files, "BOX_BYTES", 2**18)
    snapshots, whole = SnapshotStore(store), np.ones((2, 1024, 1024), np.float32)
    PolicyStore(store).publish(1, {"w": whole, "v": whole[0, 0]}, config={}, parent=0, publisher="p", gate={})
    halves = [Parts(whole.shape, whole.dtype, [Part.of(1.1 * whole[:, rows], (0, rows.start, 0))]) for rows in HALVES]
    own = [{"w": halves[0], "v": 1.1 * whole[0, 0]}, {"w": halves[1]}]
    snapshots.complete(2, [snapshots.write_part(2, own[i], incarnation="l", host=i) for i in (0, 1)], incarnation="l")
    publisher = make_publisher(store)
    tracemalloc.start()
    try:
        assert publisher.publish_newest(), publisher.refusal
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < whole.nbytes / 2, f"{peak} bytes"
    tensors, manifest = PolicyStore(store).load(2)
    np.testing.assert_array_equal(tensors["w"], 1.1 * whole)
    np.testing.assert_array_equal(tensors["v"], 1.1 * whole[0, 0])
    assert manifest["gate"]["relative_change"] == pytest.approx(0.1, rel=1e-5)
    assert all(entry["num_bytes"] < 1.1 * 2**20 for entry in manifest["files"].values())


def test_change_is_measured_against_the_policy_published_last(store: ObjectStore) -> None:
    publisher = make_publisher(store)
    for version, value in enumerate([1.4, 1.9, 2.5], start=1):
        snapshot(store, version, weights(value))
        assert publisher.publish_newest(), publisher.refusal


def test_the_last_snapshot_goes_out_after_the_stop_request(store: ObjectStore) -> None:
    snapshot(store, 7, weights(1.1))
    request_stop(store, reason="completed", source="learner", failed=False)
    lines: list[str] = []
    publish_until_stopped(
        store, CONFIG, process="sync_weights", incarnation="s0", interrupted=threading.Event(), log=lines.append
    )
    assert PolicyStore(store).current().version == 7
    assert lines == ["published policy version 7"]
    assert read_heartbeat(store, "sync_weights").progress["published_version"] == 7


def test_a_signal_before_the_stop_request_is_an_interruption(store: ObjectStore) -> None:
    interrupted = threading.Event()
    interrupted.set()
    with pytest.raises(Interrupted):
        publish_until_stopped(
            store, CONFIG, process="sync_weights", incarnation="s0", interrupted=interrupted, log=print
        )

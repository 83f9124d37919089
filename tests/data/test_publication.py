import threading

import numpy as np
import pytest

from tunix_core import paths
from tunix_core.config import RunConfig, SyncConfig
from tunix_core.config_loading import load_recipe
from tunix_core.data.publication import Publisher, judge, publish_until_stopped
from tunix_core.errors import Interrupted
from tunix_core.storage.control import read_heartbeat, request_stop
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.snapshots import SnapshotStore
from tunix_core.storage.store import ObjectStore, open_store, read_json

CONFIG = load_recipe("lookup", {"sync.interval_seconds": 0.05})


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
    received, figures = judge(tensors, weights(), SyncConfig())
    assert received == reason
    assert set(figures) == {"max_abs_weight", "relative_change"}


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

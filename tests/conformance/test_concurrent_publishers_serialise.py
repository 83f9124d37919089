"""Overlapping weight syncs (SkyRL #1605)."""

import threading

import numpy as np

from tests.data.test_publication import CONFIG, snapshot, weights
from tunix_core.data.publication import Publisher
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.snapshots import SnapshotStore
from tunix_core.storage.store import open_store


def test_concurrent_publishers_serialise(tmp_path) -> None:
    """Two publishers over 12 snapshots: the pointer only rises, each version is whole and one publisher's."""
    uri = str(tmp_path)
    store = open_store(uri)
    PolicyStore(store).publish(0, weights(), config={}, parent=None, publisher="warm_start", gate={})
    done = threading.Event()
    seen: list[int] = []
    failures: list[BaseException] = []

    def publish(name: str) -> None:
        try:
            publisher = Publisher(open_store(uri), CONFIG, process=name)
            while not done.is_set():
                publisher.publish_newest()
            publisher.publish_newest()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=publish, args=(name,)) for name in ("sync_a", "sync_b")]
    for thread in threads:
        thread.start()
    for version in range(1, 13):
        snapshot(store, version, weights(1 + version / 100))
        while PolicyStore(store).current().version < version and not failures:
            seen.append(PolicyStore(store).current().version)
    done.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert seen == sorted(seen)
    assert PolicyStore(store).current().version == 12
    for version in PolicyStore(store).versions()[1:]:
        tensors, manifest = PolicyStore(store).load(version)  # verified against its manifest
        np.testing.assert_array_equal(tensors["a"], SnapshotStore(store).load(version)["a"])
        assert manifest["publisher"] in ("sync_a", "sync_b")

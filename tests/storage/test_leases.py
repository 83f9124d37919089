"""Leases hold what is read, and what is retired cannot be leased any more."""

from __future__ import annotations

import json
import time

import pytest

from tests.support.stores import ScriptedStore
from tunix_core import paths
from tunix_core.errors import ConfigError, CorruptObject, ObjectMissing
from tunix_core.storage import retirement
from tunix_core.storage.leases import CLOCK_MARGIN_SECONDS, is_held, leased, read_leases
from tunix_core.storage.store import ObjectStore

FOLDER = paths.policy(4)


def fill(store: ObjectStore) -> None:
    store.put_if_absent(FOLDER + "a/model.safetensors", b"weights")
    store.put_if_absent(FOLDER + paths.MANIFEST, b"{}")


def delete(store: ObjectStore) -> list[str]:
    return retirement.delete_retired(store, paths.POLICIES, grace_seconds=0)


def test_what_is_leased_stays_until_the_lease_ends(store: ObjectStore) -> None:
    fill(store)
    with leased(store, [FOLDER], reader="evaluate"):
        retirement.retire(store, FOLDER, reason="old")
        assert delete(store) == []
        assert store.get(FOLDER + "a/model.safetensors") == b"weights"
    assert delete(store) == [FOLDER]
    assert store.list_after(paths.POLICIES) == []
    assert store.list_after(paths.LEASES) == []


def test_what_is_retired_cannot_be_leased(memory: ObjectStore) -> None:
    fill(memory)
    retirement.retire(memory, FOLDER, reason="old")
    with pytest.raises(ObjectMissing, match="retired"), leased(memory, [FOLDER], reader="late"):
        raise AssertionError("it may be gone any moment")
    assert memory.list_after(paths.LEASES) == []


@pytest.mark.parametrize("at", ["write of the lease", "look for the mark"])
def test_whoever_comes_between_the_two_looks_sees_the_other(memory: ObjectStore, at: str) -> None:
    """Retiring and deleting happen in the middle of taking a lease: the reader gives way, or the deletion does."""
    fill(memory)
    store = ScriptedStore(memory)
    deleted: list[str] = []

    def race(verb: str, _key: str) -> str:
        if verb == ("put" if at == "write of the lease" else "exists"):
            store.script = lambda *_: "pass"
            retirement.retire(memory, FOLDER, reason="old")
            deleted.extend(delete(memory))
        return "pass"

    store.script = race
    if (
        at == "write of the lease"
    ):  # deleted before the lease was there: the reader finds nothing, as if it had come later
        with leased(store, [FOLDER], reader="slow"):
            assert not memory.exists(FOLDER + paths.MANIFEST)
        assert deleted == [FOLDER]
    else:
        with pytest.raises(ObjectMissing), leased(store, [FOLDER], reader="slow"):
            raise AssertionError("retired")
        assert deleted == [], "the lease was there before the deletion looked"


def test_a_lease_is_renewed_while_its_reader_lives_and_lapses_when_it_does_not(memory: ObjectStore) -> None:
    with leased(memory, [FOLDER], reader="slow", seconds=0.2):
        (key,) = memory.list_after(paths.LEASES)
        first = json.loads(memory.get(key))["expires_at"]
        deadline = time.monotonic() + 30
        while json.loads(memory.get(key))["expires_at"] == first:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        body = memory.get(key)
    memory.put(key, body)  # as if its process had been killed
    assert read_leases(memory) == {FOLDER}
    later = time.time() + CLOCK_MARGIN_SECONDS + 1
    assert read_leases(memory, clock=lambda: later) == frozenset()
    assert memory.list_after(paths.LEASES) == []


def test_what_a_lease_covers() -> None:
    leases = frozenset({"policies/00000004/", "trajectories/a/b.parquet"})
    assert is_held("policies/00000004/a/model", leases)
    assert is_held("policies/00000004/", leases)
    assert is_held("trajectories/a/", leases), "something in it"
    assert not is_held("policies/00000005/", leases)
    assert not is_held("trajectories/a/c.parquet", leases)


def test_bad_leases(memory: ObjectStore) -> None:
    with pytest.raises(ConfigError, match="reader"), leased(memory, [FOLDER], reader="../x"):
        pass
    memory.put(paths.lease("broken"), b'{"keys": 3}')
    with pytest.raises(CorruptObject, match="broken"):
        read_leases(memory)

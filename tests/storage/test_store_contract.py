"""What every backend promises. One suite, run on a folder, memory and `gs://` (fake-gcs-server)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tunix_core.errors import ConfigError, CorruptObject, DataError, ObjectExists, ObjectMissing, VersionConflict
from tunix_core.storage.store import (
    ObjectStore,
    map_requests,
    open_store,
    read_json,
    read_json_or_none,
    update_json,
    write_json,
    write_json_if_absent,
)

NUM_THREADS = 16

ODD_KEYS = [
    "plain.json",
    "date=2026-11-30/hour=04/a-b-00000001.parquet",
    "with space/and+plus",
    "percent%20/%2F%",
    "question?mark=1&x=#fragment",
    "ünï/çödé/日本語/🚀",
    "quote'\"/back\\slash",
    "semi;colon:at@tilde~star*",
    "deep/" + "/".join("abcdefgh"),
    "long/" + "x" * 240,
]


def race(function: Callable[[int], object]) -> list[object]:
    """Run `function(i)` in 16 threads at once; results or the exceptions."""
    barrier = threading.Barrier(NUM_THREADS)

    def enter(index: int) -> object:
        barrier.wait()
        try:
            return function(index)
        except (ObjectExists, VersionConflict) as error:
            return error

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(enter, range(NUM_THREADS)))


def test_create_is_create_only(store: ObjectStore) -> None:
    store.put_if_absent("a/b", b"first")
    with pytest.raises(ObjectExists, match="a/b"):
        store.put_if_absent("a/b", b"second")
    with pytest.raises(ObjectExists):  # equal bytes do not make it the same writer
        store.put_if_absent("a/b", b"first")
    assert store.get("a/b") == b"first"


def test_missing_objects_are_missing(store: ObjectStore) -> None:
    with pytest.raises(ObjectMissing, match="no object nothing/here"):
        store.get("nothing/here")
    with pytest.raises(ObjectMissing):
        store.get_with_version("nothing/here")
    with pytest.raises(ObjectMissing):
        store.put_if_version("nothing/here", b"x", store.put_if_absent("other", b""))
    assert not store.exists("nothing/here")
    store.delete("nothing/here")
    assert store.list_after("nothing") == []


def test_a_folder_is_no_object(store: ObjectStore) -> None:
    store.put_if_absent("folder/object", b"x")
    assert not store.exists("folder")
    with pytest.raises(ObjectMissing):
        store.get("folder")


def test_versions_change_with_every_write(store: ObjectStore) -> None:
    first = store.put_if_absent("k", b"same")
    assert store.get_with_version("k") == (b"same", first)
    second = store.put_if_version("k", b"same", first)
    assert second != first
    with pytest.raises(VersionConflict):  # A -> A is a change too
        store.put_if_version("k", b"late", first)
    store.put("k", b"same")
    with pytest.raises(VersionConflict):  # an unconditional write counts as well
        store.put_if_version("k", b"late", second)
    store.delete("k")
    third = store.put_if_absent("k", b"same")
    assert third not in (first, second)
    with pytest.raises(VersionConflict):  # deleted and created again is not the same object
        store.put_if_version("k", b"late", second)
    assert store.get_with_version("k") == (b"same", third)


def test_deleted_objects_take_no_conditional_write(store: ObjectStore) -> None:
    version = store.put_if_absent("k", b"x")
    store.delete("k")
    with pytest.raises(ObjectMissing):
        store.put_if_version("k", b"y", version)
    assert not store.exists("k")


def test_create_races_have_one_winner(store: ObjectStore) -> None:
    for round_number in range(8):
        key = f"claims/{round_number}"
        results = race(lambda i, key=key: store.put_if_absent(key, b"writer %d" % i))
        winners = [i for i, result in enumerate(results) if isinstance(result, str)]
        assert len(winners) == 1
        assert store.get(key) == b"writer %d" % winners[0]


def test_create_races_of_equal_bodies_have_one_winner(store: ObjectStore) -> None:
    results = race(lambda _: store.put_if_absent("claim", b"equal"))
    assert sum(isinstance(result, str) for result in results) == 1


def test_compare_and_swap_races_have_one_winner(store: ObjectStore) -> None:
    version = store.put_if_absent("pointer", b"start")
    for _ in range(8):
        results = race(lambda i, version=version: store.put_if_version("pointer", b"writer %d" % i, version))
        winners = [i for i, result in enumerate(results) if isinstance(result, str)]
        assert len(winners) == 1
        data, version = store.get_with_version("pointer")
        assert data == b"writer %d" % winners[0]
        assert version == results[winners[0]]


def test_no_update_is_lost(store: ObjectStore) -> None:
    def increment(current: dict | None) -> dict:
        return {"count": (current or {"count": 0})["count"] + 1}

    race(lambda _: [update_json(store, "counter", increment, retries=200) for _ in range(3)])
    assert read_json(store, "counter") == {"count": 3 * NUM_THREADS}


def test_readers_never_see_half_an_object(store: ObjectStore) -> None:
    size = 200_000
    store.put("k", b"0" * size)
    torn: list[bytes] = []

    def act(index: int) -> None:
        for _ in range(8):
            if index % 4 == 0:
                store.put("k", bytes([48 + index]) * size)
            else:
                data = store.get("k")
                if len(data) != size or len(set(data)) != 1:
                    torn.append(data)

    race(act)
    assert torn == []


def test_list_after(store: ObjectStore) -> None:
    keys = ["a/1", "a/10", "a/2", "a/b/1", "a/b/c/2", "a-b", "ab", "b/1", "a/z"]
    for key in keys:
        store.put(key, b"")
    assert store.list_after("") == sorted(keys)
    assert store.list_after("a/") == ["a/1", "a/10", "a/2", "a/b/1", "a/b/c/2", "a/z"]
    assert store.list_after("a") == ["a-b", "a/1", "a/10", "a/2", "a/b/1", "a/b/c/2", "a/z", "ab"]
    assert store.list_after("a/1") == ["a/1", "a/10"]
    assert store.list_after("a/b/") == ["a/b/1", "a/b/c/2"]
    assert store.list_after("", "a/2") == ["a/b/1", "a/b/c/2", "a/z", "ab", "b/1"]
    assert store.list_after("a/", "a/b/1") == ["a/b/c/2", "a/z"]
    assert store.list_after("a/", "a/b") == ["a/b/1", "a/b/c/2", "a/z"]
    assert store.list_after("a/", "a/b0") == ["a/z"]
    assert store.list_after("a/", "A") == store.list_after("a/")
    assert store.list_after("a/", "a/z") == []
    assert store.list_after("a/", "b") == []
    assert store.list_after("c/") == []


def test_keys_that_were_deleted_are_not_listed(store: ObjectStore) -> None:
    store.put("a/1", b"")
    store.put("a/2", b"")
    store.delete("a/1")
    assert store.list_after("a/") == ["a/2"]


def test_long_listings_are_complete(store: ObjectStore) -> None:
    keys = [f"many/{i:05d}" for i in range(1203)]
    map_requests(store, lambda key: store.put(key, b""), keys)
    assert store.list_after("many/") == keys
    assert store.list_after("many/", keys[1100]) == keys[1101:]


@pytest.mark.parametrize("key", ODD_KEYS)
def test_odd_names(store: ObjectStore, key: str) -> None:
    version = store.put_if_absent(key, b"1")
    with pytest.raises(ObjectExists):
        store.put_if_absent(key, b"2")
    store.put_if_version(key, b"3", version)
    assert store.get(key) == b"3"
    assert store.exists(key)
    assert store.list_after("") == [key]
    assert store.list_after(key) == [key]
    assert store.list_after("", key) == []
    store.delete(key)
    assert store.list_after("") == []


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/a",
        "a/",
        "a//b",
        "../a",
        "a/../b",
        ".",
        "a/.",
        ".tmp/x",
        ".locks/000",
        "a/.hidden",
        "a\0b",
        "a\nb",
        "a\x7f",
        "x" * 241,
        "/".join(["x" * 100] * 10),
        "\ud800",
    ],
)
def test_bad_names_are_refused(store: ObjectStore, key: str) -> None:
    for act in (store.get, store.exists, store.delete, store.get_with_version):
        with pytest.raises(ConfigError, match="key"):
            act(key)
    for put in (store.put, store.put_if_absent):
        with pytest.raises(ConfigError, match="key"):
            put(key, b"")
    with pytest.raises(ConfigError, match="key"):
        store.put_if_version(key, b"", "1")


@pytest.mark.parametrize("prefix", ["/", "a//", "../", ".tmp/", ".", "a/../", "a\0"])
def test_bad_prefixes_are_refused(store: ObjectStore, prefix: str) -> None:
    with pytest.raises(ConfigError, match="prefix"):
        store.list_after(prefix)


@pytest.mark.parametrize("size", [0, 1, 5 * 2**20, 60 * 2**20])
def test_sizes(store: ObjectStore, size: int) -> None:
    """60 MiB is beyond what gcsfs itself would send in one request, and conditions must still hold."""
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    version = store.put_if_absent("big", data)
    with pytest.raises(ObjectExists):
        store.put_if_absent("big", data)
    assert store.get_with_version("big") == (data, version)


def test_a_range_is_those_bytes(store: ObjectStore) -> None:
    store.put("a/b", b"0123456789")
    for start, stop in ((0, 10), (3, 7), (9, 10), (4, 4), (7, 30), (10, 12), (12, 15)):
        assert store.get_range("a/b", start, stop) == b"0123456789"[start:stop]
    for start, stop in ((0, 5), (2, 2)):
        with pytest.raises(ObjectMissing):
            store.get_range("a/c", start, stop)


def test_bodies_are_any_bytes(store: ObjectStore) -> None:
    data = b"\r\n--boundary\r\nContent-Type: x\r\n\r\n\x00\xff--\r\n"
    store.put_if_absent("k", data)
    assert store.get("k") == data


def test_two_openings_are_one_store(uri: str) -> None:
    first, second = open_store(uri), open_store(uri)
    version = first.put_if_absent("k", b"1")
    assert second.get_with_version("k") == (b"1", version)
    second.put_if_version("k", b"2", version)
    with pytest.raises(VersionConflict):
        first.put_if_version("k", b"3", version)
    assert first.uri == second.uri
    assert open_store(first.uri).get("k") == b"2"


def test_stores_below_one_another_share_objects(uri: str) -> None:
    upper, lower = open_store(uri), open_store(f"{open_store(uri).uri}/runs/one")
    lower.put("a/b", b"x")
    assert lower.list_after("") == ["a/b"]
    assert upper.list_after("") == ["runs/one/a/b"]
    assert upper.get("runs/one/a/b") == b"x"


def test_json_objects(store: ObjectStore) -> None:
    write_json_if_absent(store, "a.json", {"b": 1, "a": [1.5, None, "ü"]})
    with pytest.raises(ObjectExists):
        write_json_if_absent(store, "a.json", {})
    assert read_json(store, "a.json") == {"a": [1.5, None, "ü"], "b": 1}
    write_json(store, "a.json", {})
    assert read_json(store, "a.json") == {}
    assert read_json_or_none(store, "none.json") is None
    with pytest.raises(ObjectMissing):
        read_json(store, "none.json")
    for broken in (b"{", b"[1]", b"\xff", b""):
        store.put("broken.json", broken)
        with pytest.raises(CorruptObject, match=r"broken\.json"):
            read_json(store, "broken.json")
    with pytest.raises(DataError, match="JSON"):
        write_json(store, "nan.json", {"x": float("nan")})


def test_update_json_can_leave_things_alone(store: ObjectStore) -> None:
    assert update_json(store, "k", lambda _: None) is None
    assert not store.exists("k")
    assert update_json(store, "k", lambda current: {"n": 1} if current is None else None) == {"n": 1}
    version = store.get_with_version("k")[1]
    assert update_json(store, "k", lambda _: None) == {"n": 1}
    assert store.get_with_version("k")[1] == version


def test_update_json_gives_up(store: ObjectStore) -> None:
    write_json(store, "k", {"n": 0})

    def contended(current: dict | None) -> dict:
        assert current is not None
        write_json(store, "k", {"n": current["n"] + 1})  # someone is always faster
        return {"n": -1}

    with pytest.raises(VersionConflict, match="3 races"):
        update_json(store, "k", contended, retries=2)
    assert read_json(store, "k") == {"n": 3}

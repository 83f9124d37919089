from __future__ import annotations

import pytest

from tests.support.stores import ScriptedStore
from tests.support.trajectories import make_group, same_trajectory
from tunix_core import paths
from tunix_core.errors import ConfigError, DataError, Fenced, StoreError
from tunix_core.storage import shards
from tunix_core.storage.shard_checks import ShardLimits
from tunix_core.storage.shards import decode, is_tombstone
from tunix_core.storage.store import ObjectStore
from tunix_core.storage.trajectory_writer import TrajectoryWriter
from tunix_core.storage.writers import fence_incarnation, new_incarnation, read_writer, read_writers

HOUR = 3600.0
START = 1_800_001_800.0  # half past


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


def open_writer(store: ObjectStore, clock: Clock | None = None, incarnation: str = "inc0") -> TrajectoryWriter:
    return TrajectoryWriter(store, actor_id="actor_0_0", incarnation=incarnation, clock=clock or Clock())


def test_shards_are_numbered_and_hold_the_rows(store: ObjectStore) -> None:
    writer = open_writer(store)
    assert read_writer(store, "inc0").hours == ()
    keys = [writer.write(make_group(i)) for i in range(3)]
    hour = paths.hour_partition(START)
    assert keys == [f"trajectories/{hour}/actor_0_0-inc0-{i:08d}.parquet" for i in range(3)]
    rows = decode(store.get(keys[1]))
    assert all(same_trajectory(rows.trajectory(i), t) for i, t in enumerate(make_group(1)))
    record = read_writer(store, "inc0")
    assert record.hours == ((hour, 0),)
    assert (record.closed, record.next_sequence, record.actor_id) == (False, None, "actor_0_0")


def test_hours_are_announced_before_their_first_shard(memory: ObjectStore) -> None:
    store, clock = ScriptedStore(memory), Clock()
    writer = open_writer(store, clock)
    writer.write(make_group(0))
    clock.now += HOUR
    store.calls.clear()
    writer.write(make_group(1))
    puts = [key for verb, key in store.calls if verb.startswith("put")]
    assert puts[0] == "writers/inc0.json"
    assert puts[1].startswith("trajectories/")
    assert [first for _, first in read_writer(store, "inc0").hours] == [0, 1]


def test_hours_never_decrease(memory: ObjectStore) -> None:
    clock = Clock()
    writer = open_writer(memory, clock)
    first = writer.write(make_group(0))
    clock.now -= 5 * HOUR
    second = writer.write(make_group(1))
    assert paths.parse_shard(first).hour == paths.parse_shard(second).hour


def test_closing_ends_with_a_tombstone(store: ObjectStore) -> None:
    writer = open_writer(store)
    key = writer.write(make_group(0))
    writer.close()
    writer.close()
    assert is_tombstone(store.get(key.replace("00000000.parquet", "00000001.parquet")))
    record = read_writer(store, "inc0")
    assert (record.closed, record.fenced, record.next_sequence) == (True, False, 1)
    with pytest.raises(DataError, match="closed"):
        writer.write(make_group(1))


def test_closing_before_the_first_shard(memory: ObjectStore) -> None:
    open_writer(memory).close()
    assert memory.list_after("trajectories/") == []
    assert read_writer(memory, "inc0").next_sequence == 0


def test_an_incarnation_is_used_once(memory: ObjectStore) -> None:
    open_writer(memory)
    with pytest.raises(Fenced, match="inc0"):
        open_writer(memory)


@pytest.mark.parametrize("num_shards", [0, 1, 3])
def test_a_fenced_writer_cannot_write_on(store: ObjectStore, num_shards: int) -> None:
    writer = open_writer(store)
    for i in range(num_shards):
        writer.write(make_group(i))
    record = fence_incarnation(store, read_writer(store, "inc0"))
    assert (record.closed, record.fenced, record.next_sequence) == (True, True, num_shards)
    before = store.list_after("trajectories/")
    with pytest.raises(Fenced):
        writer.write(make_group(9))
    with pytest.raises(Fenced):
        writer.close()
    assert store.list_after("trajectories/") == before
    assert fence_incarnation(store, "inc0") == record


def test_a_fenced_writer_cannot_escape_into_the_next_hour(memory: ObjectStore) -> None:
    clock = Clock()
    writer = open_writer(memory, clock)
    writer.write(make_group(0))
    fence_incarnation(memory, "inc0")
    clock.now += HOUR
    with pytest.raises(Fenced):
        writer.write(make_group(1))
    assert len(memory.list_after("trajectories/")) == 2  # its shard and the tombstone


def test_a_writer_that_is_only_slow_races_its_fence(memory: ObjectStore) -> None:
    """A shard that lands between the fence's listing and its tombstone counts."""
    store = ScriptedStore(memory)
    slow = open_writer(memory)
    slow.write(make_group(0))

    def land_one_more(verb: str, key: str) -> str:
        if verb == "put_if_absent" and key.startswith("trajectories/"):
            store.script = lambda _verb, _key: "pass"
            slow.write(make_group(1))
        return "pass"

    store.script = land_one_more
    assert fence_incarnation(store, "inc0").next_sequence == 2
    with pytest.raises(Fenced):
        slow.write(make_group(2))


def test_a_fence_that_died_half_way_is_completed(memory: ObjectStore) -> None:
    store = ScriptedStore(memory)
    writer = open_writer(memory)
    writer.write(make_group(0))
    for step in range(3):
        calls = iter(range(100))

        def die(verb: str, _key: str, step: int = step, calls=calls) -> str:
            return "lose" if verb.startswith("put") and next(calls) == step else "pass"

        store.script = die
        with pytest.raises(StoreError):
            fence_incarnation(store, "inc0")
        if step == 1:
            break
    store.script = lambda _verb, _key: "pass"
    record = fence_incarnation(store, "inc0")
    assert record.next_sequence == 1
    assert len(memory.list_after("trajectories/")) == 2


@pytest.mark.parametrize("action", ["fail", "lose"])
@pytest.mark.parametrize("retry", ["same", "other"])
def test_an_answer_that_was_lost(memory: ObjectStore, action: str, retry: str) -> None:
    """Whatever the store did, repeating the call commits the groups once, with no hole."""
    store, clock = ScriptedStore(memory), Clock()
    writer = open_writer(store, clock)
    writer.write(make_group(0))
    store.script = lambda verb, key: action if verb == "put_if_absent" and "trajectories" in key else "pass"
    with pytest.raises(StoreError):
        writer.write(make_group(1))
    store.script = lambda _verb, _key: "pass"
    clock.now += HOUR  # the number in doubt must not appear in a second hour
    if retry == "same":
        writer.write(make_group(1))
    writer.write(make_group(2))
    keys = memory.list_after("trajectories/")
    names = sorted((paths.parse_shard(key) for key in keys), key=lambda name: name.sequence)
    assert [name.sequence for name in names] == list(range(len(names)))
    groups = [decode(memory.get(name.key)).column("group_id")[0] for name in names]
    expected = [0, 1, 2] if retry == "same" or action == "lose" else [0, 2]
    assert groups == [f"00000000-{i:08d}" for i in expected]
    assert [h for h, _ in read_writer(memory, "inc0").hours] == sorted({n.hour for n in names})


def test_closing_after_an_answer_that_was_lost(memory: ObjectStore) -> None:
    store = ScriptedStore(memory)
    writer = open_writer(store)
    store.script = lambda verb, key: "lose" if verb == "put_if_absent" and "trajectories" in key else "pass"
    with pytest.raises(StoreError):
        writer.write(make_group(0))
    store.script = lambda _verb, _key: "pass"
    writer.close()
    assert read_writer(memory, "inc0").next_sequence == 1


@pytest.mark.parametrize("actor_id", ["", "actor-0", "A", "a/b", ".a", "a" * 101])
def test_bad_actor_ids(memory: ObjectStore, actor_id: str) -> None:
    with pytest.raises(ConfigError, match="actor_id"):
        TrajectoryWriter(memory, actor_id=actor_id, incarnation="inc0")


@pytest.mark.parametrize("incarnation", ["", "a-b", "A", "../x", "a" * 65])
def test_bad_incarnations(memory: ObjectStore, incarnation: str) -> None:
    with pytest.raises(ConfigError, match="incarnation"):
        TrajectoryWriter(memory, actor_id="a", incarnation=incarnation)


def test_bad_shards_are_refused(memory: ObjectStore) -> None:
    writer = open_writer(memory)
    with pytest.raises(DataError, match="none"):
        writer.write([])
    with pytest.raises(DataError, match="twice"):
        writer.write(make_group(0) * 2)
    assert memory.list_after("trajectories/") == []


def test_a_shard_that_readers_would_refuse_is_not_written(memory: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LIMITS", ShardLimits(max_rows=3))
    writer = open_writer(memory)
    with pytest.raises(DataError, match=r"shard: rows: received 4, accepted at most 3\. Write fewer groups"):
        writer.write(make_group(0))
    assert memory.list_after("trajectories/") == []


def test_incarnations_sort_by_time(memory: ObjectStore) -> None:
    ids = [new_incarnation(START + i) for i in range(5)]
    assert ids == sorted(ids)
    assert len({new_incarnation(START) for _ in range(100)}) == 100
    for name in reversed(ids):
        open_writer(memory, incarnation=name)
    assert [record.incarnation for record in read_writers(memory)] == ids

"""Compaction: every row stays what it was and where references say, whatever breaks off at whatever point."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from tests.storage.test_trajectory_writer import HOUR, Clock, open_writer
from tests.support.stores import ScriptedStore
from tests.support.trajectories import make_group, same_trajectory
from tunix_core import paths
from tunix_core.errors import CorruptObject, ObjectMissing, StoreError
from tunix_core.storage import compaction
from tunix_core.storage.leases import leased
from tunix_core.storage.memory_store import MemoryStore
from tunix_core.storage.shard_archive import ShardArchive, read_compacted, read_rows
from tunix_core.storage.shards import encode
from tunix_core.storage.store import ObjectStore
from tunix_core.storage.writers import read_writer
from tunix_core.types import RowRef, Trajectory

_NAMES = itertools.count()


def write(store: ObjectStore, num_shards: int = 5) -> tuple[str, dict[str, list[Trajectory]]]:
    """Two writers' shards in one hour, closed; the hour and every shard's rows."""
    clock = Clock()
    shards: dict[str, list[Trajectory]] = {}
    for number, incarnation in enumerate(("inc0", "inc1")):
        writer = open_writer(store, clock, incarnation)
        for index in range(num_shards):
            rows = make_group(100 * number + index, incarnation=incarnation)
            shards[writer.write(rows)] = rows
        writer.close()
    return paths.parse_shard(next(iter(shards))).hour, shards


def contents(store: ObjectStore, keys: list[str] | None = None) -> dict[str, list[Trajectory]]:
    archive = ShardArchive(store)
    found = {}
    for shard in archive.read(archive.keys() if keys is None else keys):
        assert shard.rows is not None, shard.fault
        if shard.rows.num_rows:
            assert shard.key not in found, "counted twice"
            found[shard.key] = [shard.rows.trajectory(row) for row in range(shard.rows.num_rows)]
    return found


def check_all(store: ObjectStore, shards: dict[str, list[Trajectory]]) -> None:
    found = contents(store)
    assert found.keys() == shards.keys()
    for key, rows in shards.items():
        assert all(itertools.starmap(same_trajectory, zip(found[key], rows, strict=True)))


def compact_whole(store: ObjectStore, hour: str) -> None:
    compaction.compact(store, hour, owner="checkpoint", target_file_bytes=25_000)
    compaction.retire_sources(store, hour)
    compaction.delete_sources(store, hour, grace_seconds=0)


def test_rows_are_where_they_were(store: ObjectStore) -> None:
    hour, shards = write(store)
    before = ShardArchive(store).keys()
    digests = {shard.key: shard.sha256 for shard in ShardArchive(store).read(before)}
    found = compaction.compact(store, hour, owner="checkpoint", target_file_bytes=25_000)
    assert found.shards.keys() == shards.keys()
    assert 1 < len(found.files) < len(shards)
    check_all(store, shards)
    compaction.retire_sources(store, hour)
    deleted = compaction.delete_sources(store, hour, grace_seconds=0)
    assert deleted == sorted(shards)
    check_all(store, shards)
    assert ShardArchive(store).keys() == before, "names stay, tombstones too"
    assert {shard.key: shard.sha256 for shard in ShardArchive(store).read(before)} == digests
    refs = [RowRef(shard=key, row=row) for key in reversed(shards) for row in (3, 0)]
    for ref, row in zip(refs, read_rows(store, refs), strict=True):
        assert same_trajectory(row, shards[ref.shard][ref.row])
    assert len(store.list_after(paths.TRAJECTORIES)) == 2, "the tombstones"


def test_a_reader_that_listed_before_goes_on_after(memory: ObjectStore) -> None:
    hour, _ = write(memory)
    archive = ShardArchive(memory)
    keys = archive.keys()
    reading = archive.read(keys)
    first = next(reading)
    compact_whole(memory, hour)
    rest = list(reading)
    assert [first.key, *(shard.key for shard in rest)] == keys
    assert all(shard.rows is not None for shard in rest)
    with pytest.raises(ObjectMissing):
        list(archive.read([keys[0].replace("inc0", "inc9")]))


def test_what_cannot_be_read_or_ends_a_writer_stays(memory: ObjectStore) -> None:
    hour, shards = write(memory)
    keys = sorted(shards)
    memory.put(keys[1], memory.get(keys[1])[:-20])
    memory.put(keys[2], encode(make_group(900, num_tokens=12, temperature=-1.0)))
    compact_whole(memory, hour)
    left = memory.list_after(paths.TRAJECTORIES)
    assert [key for key in left if key in shards] == keys[1:3]
    faults = {shard.key: shard.fault for shard in ShardArchive(memory).read(keys) if shard.rows is None}
    assert list(faults) == [keys[1]]


def test_a_late_shard_is_read_beside_the_files(memory: ObjectStore) -> None:
    hour, shards = write(memory)
    compact_whole(memory, hour)
    writer = open_writer(memory, Clock(), "late")
    rows = make_group(500, incarnation="late")
    shards[writer.write(rows)] = rows
    writer.close()
    compact_whole(memory, hour)
    check_all(memory, shards)


def test_an_hour_with_one_shard_is_left_alone(memory: ObjectStore) -> None:
    writer = open_writer(memory, Clock())
    rows = make_group(0)
    key = writer.write(rows)
    writer.close()
    compact_whole(memory, paths.parse_shard(key).hour)
    check_all(memory, {key: rows})
    assert memory.exists(key)


@pytest.mark.parametrize("action", ["fail", "lose"])
def test_a_crash_at_any_request_loses_nothing_and_the_next_pass_completes_it(action: str) -> None:
    for number in itertools.count():
        memory = MemoryStore(f"compaction-{next(_NAMES)}")
        hour, shards = write(memory, 2)
        store, calls = ScriptedStore(memory), itertools.count()
        store.script = lambda _verb, _key, n=number, c=calls: action if next(c) == n else "pass"
        with contextlib.suppress(StoreError):
            compact_whole(store, hour)
        check_all(memory, shards)
        if len(store.calls) <= number:
            break
        compact_whole(memory, hour)
        check_all(memory, shards)
        assert not set(memory.list_after(paths.TRAJECTORIES)) & shards.keys(), f"request {number}"
        found = read_compacted(memory, hour)
        assert found is not None
        listed = {key for key in memory.list_after(paths.COMPACTED) if key.endswith(".parquet")}
        assert listed == {entry.key for entry in found.files.values()}, f"request {number}: files of nobody"
    assert number > 15


def test_of_two_that_compact_at_once_one_wins(memory: ObjectStore) -> None:
    hour, shards = write(memory)
    store = ScriptedStore(memory)

    def overtake(verb: str, key: str) -> str:
        if verb == "put_if_absent" and key.endswith(paths.MANIFEST):
            store.script = lambda *_: "pass"
            compaction.compact(memory, hour, owner="second")
        return "pass"

    store.script = overtake
    found = compaction.compact(store, hour, owner="first")
    assert all("/second-" in entry.key for entry in found.files.values())
    assert len([key for key in memory.list_after(paths.COMPACTED) if key.endswith(".parquet")]) == len(found.files)
    check_all(memory, shards)


def test_pins_leases_and_the_grace_hold_the_shards(memory: ObjectStore) -> None:
    hour, shards = write(memory)
    compaction.compact(memory, hour, owner="checkpoint")
    assert compaction.delete_sources(memory, hour, grace_seconds=0) is None, "not retired"
    compaction.retire_sources(memory, hour, clock=lambda: 1000.0)
    assert compaction.delete_sources(memory, hour, grace_seconds=60, clock=lambda: 1059.0) is None
    last = max(shards)
    pinned = compaction.delete_sources(memory, hour, grace_seconds=0, pins=lambda: lambda key: key == last)
    assert pinned is None
    with leased(memory, [last], reader="view"):
        assert compaction.delete_sources(memory, hour, grace_seconds=0) is None
    assert all(memory.exists(key) for key in shards)
    assert compaction.delete_sources(memory, hour, grace_seconds=60, clock=lambda: 1060.0) == sorted(shards)


def test_a_broken_file_keeps_the_shards(memory: ObjectStore) -> None:
    hour, shards = write(memory)
    found = compaction.compact(memory, hour, owner="checkpoint")
    (entry,) = found.files.values()
    memory.put(entry.key, memory.get(entry.key)[:-1])
    compaction.retire_sources(memory, hour)
    with pytest.raises(CorruptObject, match="sha256"):
        compaction.delete_sources(memory, hour, grace_seconds=0)
    assert all(memory.exists(key) for key in shards)


def test_an_hour_is_sealed_once_every_writer_has_gone_on_or_ended(memory: ObjectStore) -> None:
    clock = Clock()
    first, second = open_writer(memory, clock, "inc0"), open_writer(memory, clock, "inc1")
    key = first.write(make_group(0))
    second.write(make_group(1))
    hour = paths.parse_shard(key).hour

    def sealed(later: float = 10 * HOUR) -> bool:
        writers = [read_writer(memory, name) for name in ("inc0", "inc1")]
        return compaction.is_sealed(hour, writers, now=clock() + later)

    assert not sealed()
    first.close()
    assert not sealed(), "the other one may write on"
    clock.now += HOUR
    second.write(make_group(2))
    assert sealed()
    assert not sealed(0), "the hour after has not passed"
    third = open_writer(memory, clock, "inc2")
    writers = [read_writer(memory, third.incarnation)]
    assert not compaction.is_sealed(hour, writers, now=clock() + 10 * HOUR), "announced an hour later, by its clock"
    clock.now += 3 * HOUR
    writers = [read_writer(memory, open_writer(memory, clock, "inc3").incarnation)]
    assert compaction.is_sealed(hour, writers, now=clock() + 10 * HOUR)

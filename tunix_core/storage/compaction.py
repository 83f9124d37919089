"""An hour's many shards become few files, and the shards go once nothing can need them.

Phases, each of which can be repeated after a crash at any point:
1. `compact` reads the shards, writes files of whole shards, reads them back, and commits the manifest (create-only).
2. `retire_sources` marks the shards that it names; `ShardArchive` has read them in the files since the manifest exists.
3. `delete_sources` deletes them after a grace, having looked again what is pinned and leased.

Tombstones stay: they keep a writer that only seemed dead from writing on. Shards that cannot be read, and those with faulty
rows, stay as evidence. Shards that appear in the hour later stay as well, and are read beside the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tunix_core import paths
from tunix_core.errors import CorruptObject, ObjectExists
from tunix_core.storage import multifile
from tunix_core.storage.leases import is_held, read_leases
from tunix_core.storage.shard_archive import CompactedHour, CompactedShard, read_compacted
from tunix_core.storage.shard_schema import SCHEMA
from tunix_core.storage.shards import ShardRows, decode, decode_parts, encode_table, versioned
from tunix_core.storage.store import ObjectStore, read_json_or_none, write_json_if_absent
from tunix_core.storage.writers import WriterRecord

COLUMNS = SCHEMA.append(pa.field("shard", pa.string(), nullable=False)).append(
    pa.field("row", pa.int64(), nullable=False)
)
"""Of a compacted file: a shard's, and where the row came from."""
TARGET_FILE_BYTES = 64 * 2**20
_MAX_ROWS = 2**15
_MAX_ARROW_BYTES = 2**27
"""Of one file's rows: well within what readers take in of one file (`shard_checks.LIMITS`)."""


def is_sealed(hour: str, writers: Sequence[WriterRecord], *, now: float) -> bool:
    """Whether no writer can add to the hour: each has declared a later one, or has ended.

    Args:
        hour: `date=…/hour=…`.
        now: seconds since the epoch; an hour that has not passed is never sealed.
    """
    if hour >= paths.hour_partition(now - 3600):
        return False
    for writer in writers:
        if writer.closed:
            continue
        # Who has announced itself and no hour writes into none that is long before, by whatever clock.
        declared = writer.hours[-1][0] if writer.hours else paths.hour_partition(max(0.0, writer.created_at - 3600))
        if declared <= hour:
            return False
    return True


class _Source(NamedTuple):
    key: str
    data: bytes
    rows: ShardRows


def compact(store: ObjectStore, hour: str, *, owner: str, target_file_bytes: int = TARGET_FILE_BYTES) -> CompactedHour:
    """Write the files and the manifest of a sealed hour; what is there already is returned as it is.

    Args:
        hour: `date=…/hour=…`, sealed.
        owner: who compacts, part of the files' names.
        target_file_bytes: sources that make one file, together; a larger shard makes one alone.

    Where fewer than two shards can be put together the manifest says so by naming none.

    Raises:
        StoreError: nothing that was written counts; try again.
    """
    found = read_compacted(store, hour)
    if found is not None:
        return found
    keys = list(filter(paths.is_shard, store.list_after(f"{paths.TRAJECTORIES}{hour}/")))
    attempt = multifile.attempt_name(owner)
    folder = paths.compacted(hour)
    entries: dict[str, multifile.FileEntry] = {}
    shards: dict[str, CompactedShard] = {}
    for number, sources in enumerate(_batches(store, keys, target_file_bytes)):
        name = f"part-{number:05d}.parquet"
        entries |= multifile.put_files(store, folder, attempt, [(name, _encode(sources))])
        first = 0
        for source in sources:
            digest = hashlib.sha256(source.data).hexdigest()
            shards[source.key] = CompactedShard(name, first, source.rows.num_rows, len(source.data), digest)
            first += source.rows.num_rows
    if len(shards) < 2:
        _discard(store, entries)
        entries, shards = {}, {}
    fields = {"hour": hour, "shards": {key: list(place) for key, place in shards.items()}}
    with contextlib.suppress(ObjectExists):
        return CompactedHour(multifile.put_manifest(store, folder, attempt, entries, fields))
    _discard(store, entries)  # another one was faster
    return CompactedHour(multifile.read_manifest(store, folder))


def _batches(store: ObjectStore, keys: Sequence[str], target_file_bytes: int) -> Iterator[list[_Source]]:
    """Whole shards in order, without those that stay as they are; one batch in memory at a time."""
    batch: list[_Source] = []
    num_bytes = num_rows = unpacked = 0
    for key in keys:
        data = store.get(key)
        try:
            rows = decode(data)
        except CorruptObject:
            continue
        if not rows.num_rows or rows.faults:
            continue
        size = sum(rows.array(name).nbytes for name in SCHEMA.names)
        full = (
            num_bytes + len(data) > target_file_bytes
            or num_rows + rows.num_rows > _MAX_ROWS
            or unpacked + size > _MAX_ARROW_BYTES
        )
        if batch and full:
            yield batch
            batch = []
            num_bytes = num_rows = unpacked = 0
        batch.append(_Source(key, data, rows))
        num_bytes, num_rows, unpacked = num_bytes + len(data), num_rows + rows.num_rows, unpacked + size
    if batch:
        yield batch


def _encode(sources: Sequence[_Source]) -> bytes:
    """One file, which has been read back: from it every source's rows come as they were."""
    tables = []
    for source in sources:
        num = source.rows.num_rows
        columns = [source.rows.array(name) for name in SCHEMA.names]
        columns += [pa.array([source.key] * num, pa.string()), pa.array(np.arange(num))]
        tables.append(pa.Table.from_arrays(columns, schema=COLUMNS))
    data = encode_table(versioned(pa.concat_tables(tables).combine_chunks()))
    ends = np.cumsum([source.rows.num_rows for source in sources]).tolist()
    parts = [(end - source.rows.num_rows, source.rows.num_rows) for source, end in zip(sources, ends, strict=True)]
    for source, rows in zip(sources, decode_parts(data, parts), strict=True):
        same = all(rows.array(name).equals(source.rows.array(name)) for name in SCHEMA.names)
        if rows.faults or not same:  # a fault of ours or of the codec: the sources stay
            raise CorruptObject(f"{source.key}: its rows do not come back from the compacted file")
    return data


def _discard(store: ObjectStore, entries: dict[str, multifile.FileEntry]) -> None:
    for entry in entries.values():
        store.delete(entry.key)


def retire_sources(store: ObjectStore, hour: str, *, clock: Callable[[], float] = time.time) -> None:
    """Mark the shards of a compacted hour for deletion; fine to repeat."""
    with contextlib.suppress(ObjectExists):
        write_json_if_absent(store, paths.compacted(hour) + paths.SOURCES_RETIRED, {"retired_at": clock()})


def delete_sources(
    store: ObjectStore,
    hour: str,
    *,
    grace_seconds: float,
    pins: Callable[[], Callable[[str], bool]] = lambda: lambda _: False,
    clock: Callable[[], float] = time.time,
) -> list[str] | None:
    """Delete the shards that the hour's manifest stands for; returns their keys, None where it is not time.

    Nothing goes before the grace is over, while a shard of the hour is pinned or leased, or unless every file is what
    the manifest promises.

    Args:
        pins: looks once more what is referred to; returns shard key -> whether something still does.

    Raises:
        CorruptObject: a compacted file is broken; the sources stay.
    """
    folder = paths.compacted(hour)
    found = read_compacted(store, hour)
    mark = read_json_or_none(store, folder + paths.SOURCES_RETIRED)
    if found is None or mark is None or clock() - float(mark["retired_at"]) < grace_seconds:
        return None
    there = [key for key in store.list_after(f"{paths.TRAJECTORIES}{hour}/") if key in found.shards]
    if there:
        leases, is_pinned = read_leases(store, clock=clock), pins()
        if any(is_held(key, leases) or is_pinned(key) for key in there):
            return None
        for name in found.files:
            multifile.read_file(store, found.manifest, name)
    for key in there:
        store.delete(key)
    mentioned = {entry.key for entry in found.files.values()}
    mentioned |= {folder + name for name in (paths.MANIFEST, paths.SOURCES_RETIRED)}
    for key in store.list_after(folder):
        if key not in mentioned:
            store.delete(key)  # of an attempt that died or lost
    return there

"""All trajectories of a run, whether their shards lie as actors wrote them or in compacted files: the only way to walk them.

Shards keep their names for ever: step records, evaluations and quarantine refer to `(shard, row)`. An hour that
was compacted has a manifest that says in which file, and from which row on, each of its shards lies; a shard that it
names is read there and nowhere else, so nothing counts twice while the sources still exist. What came late, ends a writer
or cannot be read stays where it was and is read there.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tunix_core import paths
from tunix_core.errors import CorruptObject, ObjectMissing
from tunix_core.storage import multifile
from tunix_core.storage.shards import ShardRows, decode, decode_parts
from tunix_core.storage.store import ObjectStore, map_requests
from tunix_core.types import RowRef, Trajectory

_AT_A_TIME = 16
"""Objects fetched together."""


class CompactedShard(NamedTuple):
    """Where an hour's manifest says that a shard lies."""

    file: str
    """Name in the manifest's table of files."""
    row: int
    """Its first one there."""
    num_rows: int
    num_bytes: int
    """Of the source."""
    sha256: str
    """Of the source."""


class ArchivedShard(NamedTuple):
    """One shard's rows. Either `rows` or `fault` is set."""

    key: str
    sha256: str
    """Of the object that the actor wrote."""
    num_bytes: int
    """Likewise."""
    rows: ShardRows | None
    fault: str


class CompactedHour:
    """The manifest of a compacted hour."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        """Raises CorruptObject when it is malformed."""
        self.manifest = manifest
        try:
            self.shards = {str(key): CompactedShard(*entry) for key, entry in manifest["shards"].items()}
            self.files = {str(name): multifile.file_entry(manifest, name) for name in manifest["files"]}
            strays = {entry.file for entry in self.shards.values()} - self.files.keys()
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptObject(f"manifest of a compacted hour: {error!r}") from error
        if strays:
            raise CorruptObject(f"manifest of a compacted hour: shards in {sorted(strays)}, which it has not")


def read_compacted(store: ObjectStore, hour: str) -> CompactedHour | None:
    """None where the hour is not compacted (yet)."""
    try:
        return CompactedHour(multifile.read_manifest(store, paths.compacted(hour)))
    except ObjectMissing:
        return None


def as_read(key: str, data: bytes, *, vocab_size: int | None = None) -> ArchivedShard:
    """A shard from its bytes."""
    digest = hashlib.sha256(data).hexdigest()
    try:
        return ArchivedShard(key, digest, len(data), decode(data, vocab_size=vocab_size), "")
    except CorruptObject as error:
        return ArchivedShard(key, digest, len(data), None, str(error))


class ShardArchive:
    """The shards of a run as they are now; manifests are read once."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._hours: dict[str, CompactedHour | None] = {}
        self.strays: list[str] = []
        """What `keys` found last among the shards that has no shard's name."""

    def compacted(self, hour: str) -> CompactedHour | None:
        if hour not in self._hours:
            self._hours[hour] = read_compacted(self._store, hour)
        return self._hours[hour]

    def keys(self, hour: str = "", *, chosen: Callable[[str], bool] = lambda _: True) -> list[str]:
        """Keys of all shards, or of an hour's (`date=…/hour=…`), in order, tombstones included.

        Args:
            chosen: hour -> whether its shards are wanted.
        """
        under = f"{hour}/" if hour else ""
        # Shards first: one that goes after its manifest was written is found in the manifest.
        listed = self._store.list_after(paths.TRAJECTORIES + under)
        self.strays = [key for key in listed if not paths.is_shard(key)]
        found = {key for key in listed if paths.is_shard(key) and chosen(paths.parse_shard(key).hour)}
        hours = self._compacted_hours(hour)
        for name in {paths.parse_shard(key).hour for key in found}.difference(hours):
            self._hours[name] = None
        for name in hours:
            if chosen(name):
                entry = self.compacted(name)
                found.update(entry.shards if entry else ())
        return sorted(found)

    def objects(self) -> tuple[list[str], list[str]]:
        """The objects to read, for programs that read Parquet themselves: shards, and compacted files of several."""
        keys = self.keys()
        places = {key: self._place(key) for key in keys}
        files = {
            found.files[place.file].key
            for key, place in places.items()
            if place is not None and (found := self.compacted(paths.parse_shard(key).hour)) is not None
        }
        return [key for key in keys if places[key] is None], sorted(files)

    def _compacted_hours(self, hour: str) -> list[str]:
        if hour:
            return [hour]
        suffix = "/" + paths.MANIFEST
        keys = self._store.list_after(paths.COMPACTED)
        return [key.removeprefix(paths.COMPACTED).removesuffix(suffix) for key in keys if key.endswith(suffix)]

    def read(self, keys: Iterable[str], *, vocab_size: int | None = None) -> Iterator[ArchivedShard]:
        """The shards of `keys`, in that order of hours and files; few are in memory at a time.

        Args:
            vocab_size: tokens outside it make a row faulty.

        Raises:
            ObjectMissing: a shard lies nowhere.
        """
        wanted = list(keys)
        for start in range(0, len(wanted), _AT_A_TIME):
            block = wanted[start : start + _AT_A_TIME]
            places = {key: self._place(key) for key in block}
            yield from self._read_block(block, places, vocab_size)

    def _read_block(
        self, block: list[str], places: Mapping[str, CompactedShard | None], vocab_size: int | None
    ) -> Iterator[ArchivedShard]:
        sources = [key for key in block if places[key] is None]
        data = dict(zip(sources, map_requests(self._store, self._get, sources), strict=True))
        of_file: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
        for key in block:
            place = places[key]
            if place is not None:
                of_file[paths.parse_shard(key).hour, place.file].append(key)
        unpacked: dict[str, ArchivedShard] = {}
        for key in block:
            if key in data:
                yield self._source(key, data.pop(key), vocab_size)
                continue
            if key not in unpacked:
                place = places[key]
                assert place is not None
                hour = paths.parse_shard(key).hour
                unpacked.update(self._unpack(hour, place.file, of_file[hour, place.file], vocab_size))
            yield unpacked.pop(key)

    def _place(self, key: str) -> CompactedShard | None:
        hour = self.compacted(paths.parse_shard(key).hour)
        return None if hour is None else hour.shards.get(key)

    def _get(self, key: str) -> tuple[bytes, CompactedShard | None]:
        """A source's bytes; where it is gone, compacted since the manifest was looked for, its place."""
        try:
            return self._store.get(key), None
        except ObjectMissing:
            self._hours.pop(paths.parse_shard(key).hour, None)
            place = self._place(key)
            if place is None:
                raise
            return b"", place

    def _source(self, key: str, found: tuple[bytes, CompactedShard | None], vocab_size: int | None) -> ArchivedShard:
        data, place = found
        if place is not None:
            return self._unpack(paths.parse_shard(key).hour, place.file, [key], vocab_size)[key]
        return as_read(key, data, vocab_size=vocab_size)

    def _unpack(self, hour: str, file: str, keys: list[str], vocab_size: int | None) -> dict[str, ArchivedShard]:
        """Shards of one compacted file, which is read once."""
        found = self.compacted(hour)
        assert found is not None
        places = [found.shards[key] for key in keys]
        data = multifile.read_file(self._store, found.manifest, file)
        parts = decode_parts(data, [(place.row, place.num_rows) for place in places], vocab_size=vocab_size)
        return {
            key: ArchivedShard(key, place.sha256, place.num_bytes, rows, "")
            for key, place, rows in zip(keys, places, parts, strict=True)
        }


class RowReader:
    """Rows by reference; keeps the shards used last, since a batch's rows share few shards."""

    def __init__(self, store: ObjectStore, *, max_shards: int = 64) -> None:
        self._archive = ShardArchive(store)
        self._max_shards = max_shards
        self._shards: collections.OrderedDict[str, ShardRows] = collections.OrderedDict()

    def read(self, refs: Iterable[RowRef]) -> list[Trajectory]:
        """The trajectories, in the order of `refs`.

        Raises:
            ObjectMissing: a shard is gone.
            CorruptObject: a shard or a row cannot be used.
        """
        wanted = list(refs)
        missing = [key for key in dict.fromkeys(ref.shard for ref in wanted) if key not in self._shards]
        shards = dict(self._shards)
        for found in self._archive.read(missing):
            if found.rows is None:
                raise CorruptObject(f"{found.key}: {found.fault}")
            shards[found.key] = found.rows
        trajectories = [_row(shards[ref.shard], ref) for ref in wanted]
        for ref in wanted:
            self._shards[ref.shard] = shards[ref.shard]
            self._shards.move_to_end(ref.shard)
        while len(self._shards) > self._max_shards:
            self._shards.popitem(last=False)
        return trajectories


def read_rows(store: ObjectStore, refs: Iterable[RowRef]) -> list[Trajectory]:
    """The trajectories at `refs`, each shard fetched once. See `RowReader` to keep shards between calls."""
    return RowReader(store).read(refs)


def read_row(store: ObjectStore, ref: RowRef) -> Trajectory:
    """One row; fetches its whole shard."""
    return RowReader(store).read([ref])[0]


def _row(rows: ShardRows, ref: RowRef) -> Trajectory:
    if not 0 <= ref.row < rows.num_rows:
        raise CorruptObject(f"{ref.shard}: received row {ref.row}, accepted 0 to {rows.num_rows - 1}")
    return rows.trajectory(ref.row)

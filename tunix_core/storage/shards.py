"""Trajectory shards: the Parquet schema, its encoder and a reader that trusts nothing.

Numeric lists are read as `(offsets, values)`, without a Python object per token. A shard that cannot be
read raises `CorruptObject`; a row that cannot be used is named in `ShardRows.faults`, and the others
stay usable. The file carries a digest and rows a content hash, so a flipped bit is a fault, not data.

Versions of the schema, all of which are read:
    1  page checksums only
    2  a SHA-256 of the whole file before its footer (`shard_checks`); the columns are the same
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tunix_core.errors import CorruptObject, DataError
from tunix_core.storage.parquet_headers import Footer
from tunix_core.storage.shard_checks import LIMITS, ShardLimits, check_size, summarize, with_digest
from tunix_core.storage.shard_faults import find_faults, to_numpy
from tunix_core.storage.shard_schema import SCHEMA, TOKEN_COLUMNS, TRAJECTORY_SCALARS, TURN, content_hash
from tunix_core.types import SCHEMA_VERSION, Trajectory, Turn

_METADATA = "tunix."
_VERSION_KEY = "schema_version"
_FIRST_DIGEST_VERSION = 2
_MAX_REASON_CHARACTERS = 500
_DICTIONARY = [
    *("episode_id", "group_id", "task_id", "environment", "split", "actor_id", "incarnation", "finish_reason"),
    *("turns.list.element.role", "turns.list.element.tool_name", "reward_components.key_value.key"),
    "token_policy_version.list.element",
]


_STATISTICS = [f.name for f in SCHEMA if not pa.types.is_nested(f.type) and f.name not in ("messages", "content_hash")]
"""Minima and maxima let a query skip shards; those of long texts would be stored whole, three times over."""

WRITER_OPTIONS: Mapping[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": _DICTIONARY,
    "use_byte_stream_split": ["behavior_logprobs.list.element"],
    "write_page_checksum": True,
    "write_statistics": _STATISTICS,
}
"""Of `pyarrow.parquet.write_table`; measured beside others by `tests.benchmarks.data_plane --part encodings`."""


# --- encode -----------------------------------------------------------------------------------


def encode(trajectories: Sequence[Trajectory], *, metadata: Mapping[str, str] | None = None) -> bytes:
    """One Parquet file (one row group); row i is `trajectories[i]`.

    Args:
        metadata: texts for the file's key-value metadata, under `tunix.`.

    The values are written as they are, broken ones too: judging them is the reader's task, which does
    not trust its writers anyway.
    """
    table = pa.Table.from_arrays([_column(field, trajectories) for field in SCHEMA], schema=SCHEMA)
    return encode_table(versioned(table, metadata))


def versioned(table: pa.Table, metadata: Mapping[str, str] | None = None) -> pa.Table:
    """A table with the texts of a shard's file, among them the schema's version."""
    texts = {**(metadata or {}), _VERSION_KEY: str(SCHEMA_VERSION)}
    return table.replace_schema_metadata({_METADATA + key: value for key, value in texts.items()})


def encode_table(table: pa.Table) -> bytes:
    """One Parquet file (one row group) of a `versioned` table that has the columns of `SCHEMA`, and perhaps others."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=max(1, table.num_rows), **WRITER_OPTIONS)
    return with_digest(bytes(sink.getvalue()))


def _column(field: pa.Field, trajectories: Sequence[Trajectory]) -> pa.Array:
    name = field.name
    if name in TOKEN_COLUMNS:
        kind = field.type.value_type.to_pandas_dtype()
        return _ragged(field.type, [np.asarray(getattr(t, name), kind) for t in trajectories], kind)
    if name == "turns":
        turns = [turn for t in trajectories for turn in t.turns]
        children = [pa.array([getattr(turn, f.name) for turn in turns], f.type) for f in TURN]
        values = pa.StructArray.from_arrays(children, fields=list(TURN))
        return pa.ListArray.from_arrays(_offsets([len(t.turns) for t in trajectories]), values, type=field.type)
    if name == "reward_components":
        items = [item for t in trajectories for item in t.reward_components.items()]
        keys, values = pa.array([k for k, _ in items], pa.string()), pa.array([v for _, v in items], pa.float64())
        offsets = _offsets([len(t.reward_components) for t in trajectories])
        return pa.MapArray.from_arrays(offsets, keys, values, type=field.type)
    if name == "content_hash":
        hashes = [
            content_hash(t.tokens, t.loss_mask, t.behavior_logprobs, t.token_policy_version, t.reward)
            for t in trajectories
        ]
        return pa.array(hashes, field.type)
    if name in ("policy_version_min", "policy_version_max"):
        aligned = [len(t.loss_mask) == len(t.token_policy_version) for t in trajectories]
        return pa.array(
            [getattr(t, name) if ok else -1 for t, ok in zip(trajectories, aligned, strict=True)], field.type
        )
    return pa.array([getattr(t, name) for t in trajectories], field.type)


def _offsets(lengths: Sequence[int]) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:], dtype=np.int32)
    return pa.array(offsets)


def _ragged(kind: pa.DataType, arrays: Sequence[np.ndarray], dtype: Any) -> pa.Array:
    values = np.concatenate(arrays) if arrays else np.zeros(0, dtype)
    return pa.ListArray.from_arrays(_offsets([len(a) for a in arrays]), pa.array(values, kind.value_type), type=kind)


# --- decode -----------------------------------------------------------------------------------


class ShardRows:
    """A decoded shard by columns; N is `num_rows`. Views share the shard's memory: do not write to them."""

    def __init__(self, table: pa.Table, metadata: dict[str, str], vocab_size: int | None) -> None:
        self.num_rows: int = table.num_rows
        self.metadata = metadata
        self._arrays: dict[str, pa.Array] = {name: _one_chunk(table.column(name)) for name in SCHEMA.names}
        self._columns: dict[str, np.ndarray] = {}
        self._lists: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._turns: tuple[list[int], list[Turn]] | None = None
        self._components: tuple[list[int], list[tuple[str, float]]] | None = None
        self.faults: dict[int, str] = find_faults(self, vocab_size)
        """Row -> why it must not be used."""

    def array(self, name: str) -> pa.Array:
        """A column as Arrow has it."""
        return self._arrays[name]

    def column(self, name: str) -> np.ndarray:
        """A scalar column, `[N]`: numbers, or an object array of str.

        Raises:
            KeyError: no such column, or one of lists (use `ragged`).
        """
        if name not in self._columns:
            array = self._arrays[name]
            if pa.types.is_nested(array.type):
                raise KeyError(f"column {name} holds lists: use ragged({name!r})")
            self._columns[name] = to_numpy(array)
        return self._columns[name]

    def turn_column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """One field of the turns as `(offsets [N+1], values)`, like `ragged`."""
        array = self._arrays["turns"]
        offsets = array.offsets.to_numpy() if self.num_rows else np.zeros(1, np.int32)
        return offsets, to_numpy(array.values.field(name))

    def ragged(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A list column as `(offsets [N+1], values)`: row i is `values[offsets[i]:offsets[i + 1]]`."""
        if name not in self._lists:
            array = self._arrays[name]
            offsets = array.offsets.to_numpy() if self.num_rows else np.zeros(1, np.int32)
            self._lists[name] = (offsets, to_numpy(array.values))
        return self._lists[name]

    def list_value(self, name: str, row: int) -> np.ndarray:
        """Row `row` of a list column, `[T]`; a view."""
        offsets, values = self.ragged(name)
        return values[offsets[row] : offsets[row + 1]]

    def component(self, name: str) -> np.ndarray:
        """float64 `[N]`: one reward component of every row, NaN where a row lacks it."""
        array = self._arrays["reward_components"]
        values = np.full(self.num_rows, np.nan)
        if self.num_rows:
            row_of = np.repeat(np.arange(self.num_rows), np.diff(array.offsets.to_numpy()))
            start = array.offsets[0].as_py()
            chosen = to_numpy(array.keys)[start : start + len(row_of)] == name
            values[row_of[chosen]] = to_numpy(array.items)[start : start + len(row_of)][chosen]
        return values

    def trajectory(self, row: int) -> Trajectory:
        """Row `row` as a value; its arrays are views.

        Raises:
            CorruptObject: the row is faulty.
        """
        if row in self.faults:
            raise CorruptObject(f"row {row}: {self.faults[row]}")
        values: dict[str, Any] = {name: self.list_value(name, row) for name in TOKEN_COLUMNS}
        for name in TRAJECTORY_SCALARS:
            scalar = self.column(name)[row]
            values[name] = scalar.item() if isinstance(scalar, np.generic) else scalar
        return Trajectory(**values, turns=self._row_turns(row), reward_components=self._row_components(row))

    def _row_turns(self, row: int) -> list[Turn]:
        if self._turns is None:
            # a handful of turns per row, made once per shard and only where rows become values
            array = self._arrays["turns"]
            fields = [array.values.field(index).to_pylist() for index in range(TURN.num_fields)]
            names = [field.name for field in TURN]
            turns = [Turn(**dict(zip(names, values, strict=True))) for values in zip(*fields, strict=True)]
            self._turns = (array.offsets.to_pylist(), turns)
        offsets, turns = self._turns
        return turns[offsets[row] : offsets[row + 1]]

    def _row_components(self, row: int) -> dict[str, float]:
        if self._components is None:
            array = self._arrays["reward_components"]
            items = list(zip(array.keys.to_pylist(), array.items.to_pylist(), strict=True))
            self._components = (array.offsets.to_pylist(), items)
        offsets, items = self._components
        return dict(items[offsets[row] : offsets[row + 1]])


def read_metadata(data: bytes) -> dict[str, str]:
    """The `tunix.` texts of a shard, its rows unread. Raises CorruptObject."""
    return _texts(summarize(data, LIMITS).footer)


def is_tombstone(data: bytes) -> bool:
    """Whether these bytes end a writer: no rows, `tombstone` in the metadata. Broken bytes do not."""
    try:
        return read_metadata(data).get("tombstone") == "true"
    except CorruptObject:
        return False


def decode(data: bytes, *, vocab_size: int | None = None, limits: ShardLimits = LIMITS) -> ShardRows:
    """Read a shard.

    Args:
        vocab_size: where given, a row with a token outside `[0, vocab_size)` is a fault.
        limits: a file that is larger is refused before it is unpacked.

    Raises:
        CorruptObject: truncated or garbage bytes, another schema, a newer schema version (named), or over the limits.
    """
    return ShardRows(*_read(data, limits), vocab_size)


def decode_parts(data: bytes, parts: Sequence[tuple[int, int]], *, vocab_size: int | None = None) -> list[ShardRows]:
    """Stretches of a file's rows, each as a shard of its own: `(first row, number of rows)`. Raises as `decode`."""
    table, texts = _read(data, LIMITS)
    for first, num in parts:
        if not 0 <= first <= first + num <= table.num_rows:
            raise CorruptObject(f"rows: received {first} to {first + num}, accepted 0 to {table.num_rows}")
    # Copies: a slice's lists would still point into the lists of all rows.
    return [ShardRows(table.take(np.arange(first, first + num)), texts, vocab_size) for first, num in parts]


def _read(data: bytes, limits: ShardLimits) -> tuple[pa.Table, dict[str, str]]:
    try:
        footer, has_digest = summarize(data, limits)
        texts = _texts(footer)
        _check_version(texts.get(_VERSION_KEY, "none"), has_digest)
        check_size(data, footer, set(SCHEMA.names), limits)
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=not has_digest)
        _check_schema(file)
        table = file.read(columns=SCHEMA.names, use_threads=False)
        if table.num_rows != footer.num_rows:
            raise CorruptObject(f"rows: received {table.num_rows}, promised {footer.num_rows}")
        table.validate(full=True)
        return table, texts
    except CorruptObject as error:
        raise CorruptObject(str(error)[:_MAX_REASON_CHARACTERS]) from error
    except _BROKEN as error:
        raise CorruptObject(f"unreadable rows: {_short(error)}") from error


_BROKEN = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError, OverflowError, MemoryError)
"""What pyarrow raises on hostile bytes."""


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]


def _check_version(version: str, has_digest: bool) -> None:
    if version not in [str(known) for known in range(1, SCHEMA_VERSION + 1)]:
        raise CorruptObject(
            f"{_VERSION_KEY}: received {version[:20]}, accepted 1 to {SCHEMA_VERSION}. "
            + ("Upgrade this reader." if version.isdecimal() else "This is no trajectory shard.")
        )
    if int(version) >= _FIRST_DIGEST_VERSION and not has_digest:
        raise CorruptObject(f"sha256: missing, which {_VERSION_KEY} {version} has")


def _texts(footer: Footer) -> dict[str, str]:
    return {key.removeprefix(_METADATA): value for key, value in footer.texts.items() if key.startswith(_METADATA)}


def _check_schema(file: pq.ParquetFile) -> None:
    try:
        received = file.schema_arrow
        if received.equals(SCHEMA):  # this project's writers'
            return
        found = {name: received.field(name).type for name in received.names}
    except _BROKEN as error:
        raise CorruptObject(f"unreadable schema: {_short(error)}") from error
    for field in SCHEMA:
        if field.name not in found:
            raise CorruptObject(f"column {field.name}: missing")
        if _signature(found[field.name]) != _signature(field.type):
            raise CorruptObject(
                f"column {field.name}: received {_signature(found[field.name])}, accepted {_signature(field.type)}"
            )


def _signature(kind: pa.DataType) -> str:
    """A type without names of list elements and without nullability, in which writers differ."""
    if pa.types.is_map(kind):
        return f"map<{_signature(kind.key_type)}, {_signature(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"list<{_signature(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return "struct<" + ", ".join(f"{f.name}: {_signature(f.type)}" for f in kind) + ">"
    return str(kind)


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def check_readable(data: bytes) -> None:
    """A writer's own check of an encoded shard.

    Raises:
        DataError: readers would refuse it for its size.
    """
    try:
        check_size(data, summarize(data, LIMITS).footer, set(SCHEMA.names), LIMITS)
    except CorruptObject as error:
        raise DataError(f"shard: {error}. Write fewer groups at a time.") from error


def check_group_sizes(trajectories: Sequence[Trajectory]) -> None:
    """A writer's own check before it commits a shard.

    Raises:
        DataError: more episodes of a group than its size, or the same trajectory twice.
    """
    episodes: dict[str, set[str]] = {}
    seen: set[str] = set()
    for t in trajectories:
        if t.trajectory_id in seen:
            raise DataError(f"trajectory_id: received {t.trajectory_id!r} twice in one shard, accepted once")
        seen.add(t.trajectory_id)
        members = episodes.setdefault(t.group_id, set())
        members.add(t.episode_id)
        if len(members) > t.group_size:
            raise DataError(
                f"group {t.group_id}: received {len(members)} episodes, accepted at most group_size = {t.group_size}"
            )

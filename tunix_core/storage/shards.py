"""Trajectory shards: the Parquet schema, its encoder and a reader that trusts nothing.

Numeric lists are read as `(offsets, values)`, without a Python object per token. A shard that cannot be
read raises `CorruptObject`; a row that cannot be used is named in `ShardRows.faults`, and the others
stay usable. Pages carry checksums and rows a content hash, so a flipped bit is a fault, not data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tunix_core.errors import CorruptObject, DataError
from tunix_core.types import SCHEMA_VERSION, Trajectory, Turn

_METADATA = "tunix."
_VERSION_KEY = "schema_version"
_MAX_DECODED_BYTES = 4 * 2**30

TOKEN_COLUMNS = ("tokens", "loss_mask", "behavior_logprobs", "token_policy_version")
"""The lists with one entry per token."""


def _list_of(value: pa.DataType) -> pa.ListType:
    return pa.list_(pa.field("element", value, nullable=False))


_TURN = pa.struct(
    [
        pa.field("role", pa.string(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("end", pa.int32(), nullable=False),
        pa.field("reward", pa.float64(), nullable=False),
        pa.field("tool_name", pa.string(), nullable=False),
        pa.field("tool_ok", pa.bool_(), nullable=False),
        pa.field("seconds", pa.float64(), nullable=False),
    ]
)
_COMPONENTS = pa.map_(pa.string(), pa.field("value", pa.float64(), nullable=False))

SCHEMA = pa.schema(
    [
        pa.field(column, kind, nullable=False)
        for column, kind in (
            ("trajectory_id", pa.string()),
            ("episode_id", pa.string()),
            ("fork_index", pa.int32()),
            ("group_id", pa.string()),
            ("group_size", pa.int32()),
            ("task_id", pa.string()),
            ("environment", pa.string()),
            ("task_seed", pa.int64()),
            ("split", pa.string()),
            ("actor_id", pa.string()),
            ("incarnation", pa.string()),
            ("created_at", pa.float64()),
            ("num_tokens", pa.int32()),
            ("num_policy_tokens", pa.int32()),
            ("tokens", _list_of(pa.int32())),
            ("loss_mask", _list_of(pa.bool_())),
            ("behavior_logprobs", _list_of(pa.float32())),
            ("token_policy_version", _list_of(pa.int32())),
            ("policy_version_min", pa.int32()),
            ("policy_version_max", pa.int32()),
            ("temperature", pa.float64()),
            ("turns", _list_of(_TURN)),
            ("reward", pa.float64()),
            ("reward_components", _COMPONENTS),
            ("finish_reason", pa.string()),
            ("generation_seconds", pa.float64()),
            ("environment_seconds", pa.float64()),
            ("messages", pa.string()),
            ("content_hash", pa.string()),
        )
    ]
)
"""Column names and types of schema version 1, in order."""

_DICTIONARY = [
    *("episode_id", "group_id", "task_id", "environment", "split", "actor_id", "incarnation", "finish_reason"),
    *("turns.list.element.role", "turns.list.element.tool_name", "reward_components.key_value.key"),
    "token_policy_version.list.element",
]


_STATISTICS = [f.name for f in SCHEMA if not pa.types.is_nested(f.type) and f.name not in ("messages", "content_hash")]
"""Minima and maxima let a query skip shards; those of long texts would be stored whole, three times over."""


def content_hash(
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    behavior_logprobs: np.ndarray,
    token_policy_version: np.ndarray,
    reward: float,
) -> str:
    """SHA-256 (hex) of what training reads from a trajectory: four `[T]` arrays and the reward."""
    digest = hashlib.sha256(len(tokens).to_bytes(8, "little"))
    digest.update(np.ascontiguousarray(tokens, "<i4").data)
    digest.update(np.ascontiguousarray(loss_mask, "u1").data)
    digest.update(np.ascontiguousarray(behavior_logprobs, "<f4").data)
    digest.update(np.ascontiguousarray(token_policy_version, "<i4").data)
    digest.update(np.float64(reward).astype("<f8").tobytes())
    return digest.hexdigest()


# --- encode -----------------------------------------------------------------------------------


def encode(trajectories: Sequence[Trajectory], *, metadata: Mapping[str, str] | None = None) -> bytes:
    """One Parquet file (one row group); row i is `trajectories[i]`.

    Args:
        metadata: texts for the file's key-value metadata, under `tunix.`.

    The values are written as they are, broken ones too: judging them is the reader's task, which does
    not trust its writers anyway.
    """
    texts = {**(metadata or {}), _VERSION_KEY: str(SCHEMA_VERSION)}
    schema = SCHEMA.with_metadata({_METADATA + key: value for key, value in texts.items()})
    return encode_table(pa.Table.from_arrays([_column(field, trajectories) for field in SCHEMA], schema=schema))


def encode_table(table: pa.Table) -> bytes:
    """One Parquet file (one row group) of a table that has the columns of `SCHEMA`, and perhaps others."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        row_group_size=max(1, table.num_rows),
        compression="zstd",
        compression_level=1,
        use_dictionary=_DICTIONARY,
        use_byte_stream_split=["behavior_logprobs.list.element"],
        write_page_checksum=True,
        write_statistics=_STATISTICS,
    )
    return bytes(sink.getvalue())


def _column(field: pa.Field, trajectories: Sequence[Trajectory]) -> pa.Array:
    name = field.name
    if name in TOKEN_COLUMNS:
        kind = field.type.value_type.to_pandas_dtype()
        return _ragged(field.type, [np.asarray(getattr(t, name), kind) for t in trajectories], kind)
    if name == "turns":
        turns = [turn for t in trajectories for turn in t.turns]
        children = [pa.array([getattr(turn, f.name) for turn in turns], f.type) for f in _TURN]
        values = pa.StructArray.from_arrays(children, fields=list(_TURN))
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
        self.faults: dict[int, str] = _find_faults(self, vocab_size)
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
            self._columns[name] = _to_numpy(array)
        return self._columns[name]

    def turn_column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """One field of the turns as `(offsets [N+1], values)`, like `ragged`."""
        array = self._arrays["turns"]
        offsets = array.offsets.to_numpy() if self.num_rows else np.zeros(1, np.int32)
        return offsets, _to_numpy(array.values.field(name))

    def ragged(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A list column as `(offsets [N+1], values)`: row i is `values[offsets[i]:offsets[i + 1]]`."""
        if name not in self._lists:
            array = self._arrays[name]
            offsets = array.offsets.to_numpy() if self.num_rows else np.zeros(1, np.int32)
            self._lists[name] = (offsets, _to_numpy(array.values))
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
            chosen = _to_numpy(array.keys)[start : start + len(row_of)] == name
            values[row_of[chosen]] = _to_numpy(array.items)[start : start + len(row_of)][chosen]
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
            fields = [array.values.field(index).to_pylist() for index in range(_TURN.num_fields)]
            names = [field.name for field in _TURN]
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


TRAJECTORY_SCALARS = tuple(
    field.name
    for field in SCHEMA
    if not pa.types.is_nested(field.type)
    and field.name
    not in ("num_tokens", "num_policy_tokens", "policy_version_min", "policy_version_max", "content_hash")
)


def read_metadata(data: bytes) -> dict[str, str]:
    """The `tunix.` texts of a shard, its rows unread. Raises CorruptObject."""
    return _texts(_open(data))


def is_tombstone(data: bytes) -> bool:
    """Whether these bytes end a writer: no rows, `tombstone` in the metadata. Broken bytes do not."""
    try:
        return read_metadata(data).get("tombstone") == "true"
    except CorruptObject:
        return False


def decode(data: bytes, *, vocab_size: int | None = None) -> ShardRows:
    """Read a shard.

    Args:
        vocab_size: where given, a row with a token outside `[0, vocab_size)` is a fault.

    Raises:
        CorruptObject: truncated or garbage bytes, another schema, or a newer schema version (named).
    """
    return ShardRows(*_read(data), vocab_size)


def decode_parts(data: bytes, parts: Sequence[tuple[int, int]], *, vocab_size: int | None = None) -> list[ShardRows]:
    """Stretches of a file's rows, each as a shard of its own: `(first row, number of rows)`. Raises as `decode`."""
    table, texts = _read(data)
    for first, num in parts:
        if not 0 <= first <= first + num <= table.num_rows:
            raise CorruptObject(f"rows: received {first} to {first + num}, accepted 0 to {table.num_rows}")
    # Copies: a slice's lists would still point into the lists of all rows.
    return [ShardRows(table.take(np.arange(first, first + num)), texts, vocab_size) for first, num in parts]


def _read(data: bytes) -> tuple[pa.Table, dict[str, str]]:
    file = _open(data)
    texts = _texts(file)
    version = texts.get(_VERSION_KEY, "none")
    if version != str(SCHEMA_VERSION):
        raise CorruptObject(
            f"{_VERSION_KEY}: received {version}, accepted {SCHEMA_VERSION}. "
            + ("Upgrade this reader." if version.isdecimal() else "This is no trajectory shard.")
        )
    _check_schema(file)
    try:
        if sum(file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)) > _MAX_DECODED_BYTES:
            raise CorruptObject(f"decoded size: accepted at most {_MAX_DECODED_BYTES} bytes")
        table = file.read(columns=SCHEMA.names, use_threads=False)
        if table.num_rows != file.metadata.num_rows:
            raise CorruptObject(f"rows: received {table.num_rows}, promised {file.metadata.num_rows}")
        table.validate(full=True)
        return table, texts
    except CorruptObject:
        raise
    except _BROKEN as error:
        raise CorruptObject(f"unreadable rows: {_short(error)}") from error


_BROKEN = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError, OverflowError, MemoryError)
"""What pyarrow raises on hostile bytes."""


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]


def _open(data: bytes) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    except _BROKEN as error:
        raise CorruptObject(f"no Parquet file: {_short(error)}") from error


def _texts(file: pq.ParquetFile) -> dict[str, str]:
    raw = file.metadata.metadata or {}
    texts = {key.decode(errors="replace"): value.decode(errors="replace") for key, value in raw.items()}
    return {key.removeprefix(_METADATA): value for key, value in texts.items() if key.startswith(_METADATA)}


def _check_schema(file: pq.ParquetFile) -> None:
    try:
        received = file.schema_arrow
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


def _to_numpy(array: pa.Array) -> np.ndarray:
    if array.null_count:  # the rows are faults; the values only need to be harmless
        array = array.fill_null("" if pa.types.is_string(array.type) else array.type.to_pandas_dtype()(0))
    # no copy for numbers; bits become bytes, texts become objects
    return array.to_numpy(zero_copy_only=not (pa.types.is_boolean(array.type) or pa.types.is_string(array.type)))


# --- faults -----------------------------------------------------------------------------------


def _find_faults(rows: ShardRows, vocab_size: int | None) -> dict[int, str]:
    faults: dict[int, str] = {}

    def blame(bad_rows: np.ndarray, reason: str) -> None:
        for row in np.unique(bad_rows).tolist():
            faults.setdefault(row, reason)

    def blame_values(column: str, bad: np.ndarray, reason: str) -> None:
        positions = np.flatnonzero(bad)  # nearly always empty
        blame(np.searchsorted(rows.ragged(column)[0], positions, side="right") - 1, reason)

    _blame_nulls(rows, blame)
    num_tokens = rows.column("num_tokens")
    for name in TOKEN_COLUMNS:
        blame(np.flatnonzero(np.diff(rows.ragged(name)[0]) != num_tokens), f"{name}: length differs from num_tokens")
    blame(np.flatnonzero(num_tokens < 1), "num_tokens: accepted at least 1")
    tokens, logprobs = rows.ragged("tokens")[1], rows.ragged("behavior_logprobs")[1]
    limit = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    blame_values("tokens", (tokens < 0) | (tokens >= limit), f"tokens: accepted 0 to {limit - 1}")
    blame_values("behavior_logprobs", ~np.isfinite(logprobs), "behavior_logprobs: not finite")
    with np.errstate(over="ignore"):
        reward = rows.column("reward").astype(np.float32)  # as it is trained on
    for name, values in (
        ("reward", reward),
        ("temperature", rows.column("temperature")),
        ("created_at", rows.column("created_at")),
    ):
        blame(np.flatnonzero(~np.isfinite(values)), f"{name}: not finite")
    blame(np.flatnonzero(rows.column("temperature") <= 0), "temperature: accepted above 0")
    blame(np.flatnonzero(rows.column("group_size") < 1), "group_size: accepted at least 1")
    _blame_versions(rows, blame)
    _blame_turns(rows, blame)
    _blame_hashes(rows, faults)
    return faults


def _blame_nulls(rows: ShardRows, blame: Any) -> None:
    for name in SCHEMA.names:
        array = rows._arrays[name]
        if array.null_count:
            blame(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)), f"{name}: null")
        if name in TOKEN_COLUMNS and array.values.null_count:
            positions = np.flatnonzero(array.values.is_null().to_numpy(zero_copy_only=False))
            blame(np.searchsorted(rows.ragged(name)[0], positions, side="right") - 1, f"{name}: null entry")


def _blame_versions(rows: ShardRows, blame: Any) -> None:
    offsets, mask = rows.ragged("loss_mask")
    version_offsets, versions = rows.ragged("token_policy_version")
    row_of = np.repeat(np.arange(rows.num_rows), np.diff(offsets))
    if not np.array_equal(offsets, version_offsets):  # some row is at fault already: judge the others all the same
        aligned = (np.diff(offsets) == np.diff(version_offsets))[row_of]
        within = np.flatnonzero(aligned) - offsets[row_of[aligned]]
        row_of = row_of[aligned]
        mask, versions = mask[aligned], versions[version_offsets[row_of] + within]
    row_of = row_of[mask]
    policy = versions[mask]
    blame(row_of[policy < 0], "token_policy_version: negative on a policy token")
    counts = np.bincount(row_of, minlength=rows.num_rows)
    blame(np.flatnonzero(counts != rows.column("num_policy_tokens")), "num_policy_tokens: differs from loss_mask")
    oldest, newest = np.full(rows.num_rows, np.iinfo(np.int32).max), np.full(rows.num_rows, -1)
    np.minimum.at(oldest, row_of, policy)
    np.maximum.at(newest, row_of, policy)
    oldest[counts == 0] = -1
    blame(np.flatnonzero(oldest != rows.column("policy_version_min")), "policy_version_min: differs from the tokens")
    blame(np.flatnonzero(newest != rows.column("policy_version_max")), "policy_version_max: differs from the tokens")


def _blame_turns(rows: ShardRows, blame: Any) -> None:
    array = rows._arrays["turns"]
    offsets = array.offsets.to_numpy() if rows.num_rows else np.zeros(1, np.int32)
    row_of = np.repeat(np.arange(rows.num_rows), np.diff(offsets))
    children = {field.name: array.values.field(index) for index, field in enumerate(_TURN)}
    for name, child in children.items():
        if child.null_count or array.values.null_count:
            blame(row_of[child.is_null().to_numpy(zero_copy_only=False)], f"turns.{name}: null")
    start, end = _to_numpy(children["start"]), _to_numpy(children["end"])
    bad = (start < 0) | (end < start) | (end > rows.column("num_tokens")[row_of])
    blame(row_of[bad], "turns: indices outside the tokens")


def _blame_hashes(rows: ShardRows, faults: dict[int, str]) -> None:
    """About 5 us per row; only rows that are sound so far, others may not even align."""
    lists = [rows.ragged(name) for name in TOKEN_COLUMNS]
    rewards, hashes = rows.column("reward"), rows.column("content_hash")
    for row in range(rows.num_rows):
        if row not in faults:
            tokens, mask, logprobs, versions = (values[o[row] : o[row + 1]] for o, values in lists)
            if content_hash(tokens, mask, logprobs, versions, rewards[row]) != hashes[row]:
                faults[row] = "content_hash: differs from the content"


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

"""Well-formed Parquet with columns and rows that no actor of this project writes."""

from __future__ import annotations

import io
import math
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.trajectories import make_group
from tunix_core.storage import shards
from tunix_core.storage.shard_checks import with_digest

NAMES = (
    "../../etc/passwd",
    "/absolute",
    "a/b\\c",
    "a\x00b",
    "a\nb\x1b[2J",
    "x" * 100_000,
    "",
    "\u202eevil",
    "e\u0301" * 300,
    "<script>alert(1)</script>",
    "'; drop table trajectories; --",
)
_TEXTS = (
    *("trajectory_id", "episode_id", "group_id", "task_id", "environment", "split", "actor_id", "incarnation"),
    *("finish_reason", "messages", "content_hash"),
)
_NUMBERS = {
    "fork_index": (-1, 2**31 - 1, -(2**31)),
    "group_size": (0, -4, 2**31 - 1, 3),
    "task_seed": (-(2**63), 2**63 - 1),
    "num_tokens": (-1, 0, 2**31 - 1, 11),
    "num_policy_tokens": (-1, 2**31 - 1),
    "policy_version_min": (-2, 2**31 - 1),
    "policy_version_max": (-2, 2**31 - 1),
}
_FLOATS = ("created_at", "temperature", "reward", "generation_seconds", "environment_seconds")
_BAD_FLOATS = (math.nan, math.inf, -math.inf, -1.0, 1e308, -0.0)


def hostile_rows(rng: random.Random) -> bytes:
    """One such file."""
    table = pq.read_table(io.BytesIO(shards.encode(make_group(rng.randrange(100)))))
    for _ in range(rng.choice((1, 1, 2, 4))):
        table = rng.choice((_text, _number, _float, _lists, _components, _turns, _columns, _repeated))(rng, table)
    file = io.BytesIO()
    pq.write_table(
        table, file, compression=rng.choice(("zstd", "snappy", "none")), row_group_size=rng.choice((1, 2, 99))
    )
    return with_digest(file.getvalue())


def _set(table: pa.Table, name: str, row: int, value: object, kind: pa.DataType | None = None) -> pa.Table:
    if name not in table.column_names or table.num_rows == 0:
        return table
    index = table.column_names.index(name)
    try:
        values = table.column(name).to_pylist()
    except UnicodeDecodeError:  # an earlier change made it so
        return table
    values[row % len(values)] = value
    array = pa.array(values, kind or table.schema.field(index).type)
    return table.set_column(index, pa.field(name, array.type, nullable=True), array)


def _text(rng: random.Random, table: pa.Table) -> pa.Table:
    name, row = rng.choice(_TEXTS), rng.randrange(4)
    if rng.random() < 0.3 and name in table.column_names:
        raw = [b"\xff\xfe\x80" if i == row else b"x" for i in range(table.num_rows)]
        column = pa.array(raw, pa.binary()).view(pa.string())
        return table.set_column(table.column_names.index(name), pa.field(name, pa.string()), column)
    return _set(table, name, row, rng.choice((*NAMES, None)))


def _number(rng: random.Random, table: pa.Table) -> pa.Table:
    name = rng.choice(list(_NUMBERS))
    return _set(table, name, rng.randrange(4), rng.choice((*_NUMBERS[name], None)))


def _float(rng: random.Random, table: pa.Table) -> pa.Table:
    return _set(table, rng.choice(_FLOATS), rng.randrange(4), rng.choice((*_BAD_FLOATS, None)))


def _lists(rng: random.Random, table: pa.Table) -> pa.Table:
    name = rng.choice(shards.TOKEN_COLUMNS)
    dtype = np.float32 if name == "behavior_logprobs" else bool if name == "loss_mask" else np.int32
    bad: tuple[object, ...] = (None, [], np.zeros(1_000_000, dtype).tolist(), [None] * 12)
    if name == "behavior_logprobs":
        bad += tuple([value] * 12 for value in _BAD_FLOATS)
    if dtype is np.int32:
        bad += ([-1] * 12, [2**31 - 1] * 12)
    kind = pa.list_(pa.from_numpy_dtype(np.dtype(dtype)))
    return _set(table, name, rng.randrange(4), rng.choice(bad), kind)


def _components(rng: random.Random, table: pa.Table) -> pa.Table:
    bad: tuple[object, ...] = (
        None,
        [("answer", value) for value in _BAD_FLOATS],
        [(name, 1.0) for name in NAMES],
        [("answer", 1.0)] * 10_000,
        [("answer", None)],
    )
    return _set(table, "reward_components", rng.randrange(4), rng.choice(bad), pa.map_(pa.string(), pa.float64()))


def _turns(rng: random.Random, table: pa.Table) -> pa.Table:
    turn = {"role": "policy", "start": 0, "end": 3, "reward": 0.0, "tool_name": "", "tool_ok": True, "seconds": 0.0}
    key = rng.choice(list(turn))
    values = {"start": (-1, 2**31 - 1, None), "end": (-1, 2**31 - 1, None), "tool_ok": (None,)}
    choices: tuple[object, ...] = values.get(key, NAMES if key in ("role", "tool_name") else (*_BAD_FLOATS, None))
    bad = rng.choice((None, [None], [], [{**turn, key: rng.choice(choices)}], [turn] * 50_000))
    plain = pa.list_(pa.struct([(field.name, field.type) for field in shards.SCHEMA.field("turns").type.value_type]))
    return _set(table, "turns", rng.randrange(4), bad, plain)


def _columns(rng: random.Random, table: pa.Table) -> pa.Table:
    """Missing, renamed, doubled, of another type, or one more."""
    index, kind = rng.randrange(table.num_columns), rng.randrange(5)
    field, column = table.schema.field(index), table.column(index)
    if kind == 0:
        return table.remove_column(index)
    if kind == 1:
        return table.set_column(index, pa.field("../" + field.name, field.type), column)
    if kind == 2:
        return table.append_column(field, column)
    if kind == 3:
        other = rng.choice((pa.array([{"a": [[1]]}] * table.num_rows), pa.nulls(table.num_rows)))
        return table.set_column(index, field.name, other)
    return table.append_column("extra", pa.array([[["x"]]] * table.num_rows))


def _repeated(rng: random.Random, table: pa.Table) -> pa.Table:
    """The same rows again: one trajectory id several times, groups over their size; or no rows."""
    return pa.concat_tables([table] * rng.choice((2, 30))) if rng.random() < 0.7 else table.slice(0, 0)

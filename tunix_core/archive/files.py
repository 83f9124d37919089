"""Trajectories as files for other programs, and back: JSON lines, or a folder that Hugging Face `datasets` loads.

Every column of a shard is kept, so that what comes back is what went out, to the bit (floats are written so that
they read back alike). `messages` is a list of `{"role", "content"}` in both forms, as trainers for conversations take it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tunix_core.errors import ConfigError, DataError
from tunix_core.storage.shards import SCHEMA, TOKEN_COLUMNS, TRAJECTORY_SCALARS
from tunix_core.types import Trajectory, Turn

ROWS_PER_FILE = 20_000

_PLAIN = pa.schema(
    [SCHEMA.field(name) for name in SCHEMA.names if name in {*TRAJECTORY_SCALARS, *TOKEN_COLUMNS, "turns"}]
)
_FILE = (
    _PLAIN.set(
        _PLAIN.get_field_index("messages"),
        pa.field("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
    )
    .append(pa.field("reward_components", pa.list_(pa.struct([("name", pa.string()), ("value", pa.float64())]))))
    .remove_metadata()
)
"""Columns of a dataset's files, alike in all of them, whatever their rows leave empty."""

_CARD = """---
configs:
- config_name: default
  data_files:
  - split: {split}
    path: data/{split}-*.parquet
tags:
- trajectories
---
# Trajectories of a post-training run

{rows} trajectories, {tokens} tokens, from `{source}`. Aligned lists per token: `tokens`, `loss_mask` (true where the policy
generated), `behavior_logprobs`, `token_policy_version`. `messages` holds the conversation as text.
"""


def to_record(trajectory: Trajectory) -> dict[str, Any]:
    """Plain values, one for each column of a shard but those that follow from the others."""
    record: dict[str, Any] = {name: getattr(trajectory, name) for name in TRAJECTORY_SCALARS}
    record["messages"] = json.loads(trajectory.messages)
    for name in TOKEN_COLUMNS:
        record[name] = getattr(trajectory, name).tolist()
    record["turns"] = [dataclasses.asdict(turn) for turn in trajectory.turns]
    record["reward_components"] = dict(trajectory.reward_components)
    return record


def from_record(record: Mapping[str, Any], where: str) -> Trajectory:
    """The inverse of `to_record`.

    Args:
        where: named in errors, such as `part.jsonl line 3`.

    Raises:
        DataError: a field is missing, unknown or of the wrong kind.
    """
    names = {*TRAJECTORY_SCALARS, *TOKEN_COLUMNS, "turns", "reward_components"}
    if set(record) != names:
        missing, unknown = sorted(names - set(record)), sorted(set(record) - names)
        raise DataError(
            f"{where}: received without {missing} and with {unknown}, accepted exactly the columns of a shard"
        )
    values = dict(record)
    try:
        values["messages"] = json.dumps(record["messages"], ensure_ascii=False)
        turns = [Turn(**turn) for turn in record["turns"]]
        components = dict(record["reward_components"])
        for name in TRAJECTORY_SCALARS:
            _typed(name, values[name])
        _typed("turns", [dataclasses.asdict(turn) for turn in turns])
        _typed("reward_components", list(components.items()))
        for name in TOKEN_COLUMNS:
            values[name] = _typed(name, record[name]).values.to_numpy(zero_copy_only=False)
        lengths = {name: len(values[name]) for name in TOKEN_COLUMNS}
        if len(set(lengths.values())) != 1:
            raise DataError(f"{where}: received lists of lengths {lengths}, accepted one entry per token in each")
        values["turns"] = turns
        values["reward_components"] = {name: float(value) for name, value in components.items()}
        return Trajectory(**values)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{where}: {error}") from error


def _typed(column: str, value: Any) -> pa.Array:
    """The value as a column of one row. NumPy would take "false" for true; Arrow does not, but it too cuts 1.7 to 1.

    Raises:
        TypeError, ValueError: it is of another kind than the column, or has nulls.
    """
    try:
        array = pa.array([value], SCHEMA.field(column).type)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{column}: {error}") from error
    values = value if column in TOKEN_COLUMNS else [value]
    if pa.types.is_integer(array.type.value_type if values is value else array.type):
        fractions = [entry for entry in values if type(entry) is float]
        if fractions:
            raise ValueError(f"{column}: received {fractions[0]}, accepted integers")
    if array.null_count or (column in TOKEN_COLUMNS and array.values.null_count):
        raise ValueError(f"{column}: null")
    return array


# ---- JSON lines ---------------------------------------------------------------------------------


def write_jsonl(path: Path, trajectories: Iterable[Trajectory]) -> int:
    """Write one line each; returns how many.

    Raises:
        ConfigError: the file exists.
    """
    _refuse_existing(path)
    num = 0
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        for trajectory in trajectories:
            file.write(json.dumps(to_record(trajectory), ensure_ascii=False, allow_nan=False) + "\n")
            num += 1
    partial.rename(path)
    return num


def read_jsonl(path: Path) -> Iterator[Trajectory]:
    """Raises DataError at the first line that is none."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path} line {number}: no JSON ({error})") from error
            if not isinstance(record, dict):
                raise DataError(f"{path} line {number}: received {type(record).__name__}, accepted an object")
            yield from_record(record, f"{path} line {number}")


# ---- a folder for `datasets` --------------------------------------------------------------------


def write_dataset(folder: Path, trajectories: Iterable[Trajectory], *, split: str, source: str) -> int:
    """Write `data/<split>-00000.parquet`, … and a card; returns how many rows.

    Raises:
        ConfigError: the folder exists and is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        _refuse_existing(folder)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    num_rows = num_tokens = num_files = 0
    rows: list[dict[str, Any]] = []

    def flush() -> None:
        nonlocal num_files
        table = pa.Table.from_pylist([_listed(row) for row in rows], schema=_FILE)
        pq.write_table(table, folder / "data" / f"{split}-{num_files:05d}.parquet", compression="zstd")
        num_files += 1
        rows.clear()

    for trajectory in trajectories:
        rows.append(to_record(trajectory))
        num_rows += 1
        num_tokens += trajectory.num_tokens
        if len(rows) == ROWS_PER_FILE:
            flush()
    if rows:
        flush()
    card = _CARD.format(split=split, rows=num_rows, tokens=num_tokens, source=source)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return num_rows


def read_dataset(folder: Path) -> Iterator[Trajectory]:
    """Raises DataError at the first row that is none, ConfigError where there is no such folder."""
    files = sorted((folder / "data").glob("*.parquet"))
    if not files:
        raise ConfigError(
            "--from", str(folder), "a folder with data/*.parquet", "Export one: tunixctl export-trajectories."
        )
    for path in files:
        try:
            file = pq.ParquetFile(path)
            for batch in file.iter_batches(256):
                for number, row in enumerate(batch.to_pylist()):
                    yield from_record(_unlisted(row), f"{path} row {number}")
        except pa.ArrowException as error:
            raise DataError(f"{path}: {error}") from error


def _listed(row: dict[str, Any]) -> dict[str, Any]:
    """Components as a list of pairs: their names differ by environment, a struct would have them all."""
    components = [{"name": name, "value": value} for name, value in row["reward_components"].items()]
    return {**row, "reward_components": components}


def _unlisted(row: dict[str, Any]) -> dict[str, Any]:
    pairs = row.get("reward_components") or []
    return {**row, "reward_components": {pair["name"]: pair["value"] for pair in pairs}}


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise ConfigError("--to", str(path), "a path where nothing lies yet", "Choose another one, or remove it.")

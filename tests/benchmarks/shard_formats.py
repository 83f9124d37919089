"""Writing and reading the same trajectories as shards, JSON lines, pickles and Arrow files; beside them memory and disk.

Rates count the Arrow bytes of the rows, the same for all. Written is to a file that is synced; read is from a warm page cache
to what a learner takes: NumPy arrays of the token columns. Only shards are judged while they are read, row by row.
Pickles are written and loaded in this process alone, to be measured.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tests.benchmarks.data_workload import make_trajectories
from tests.benchmarks.figures import Goal, Sample
from tunix_core.archive.files import to_record
from tunix_core.storage.shard_schema import SCHEMA, TOKEN_COLUMNS
from tunix_core.storage.shards import decode, encode
from tunix_core.types import Trajectory

ROWS_PER_SHARD = 256
GOAL_BYTES = 0.25
"""Bytes per token over those of JSON lines."""


class Format(NamedTuple):
    encode: Callable[[Sequence[Trajectory]], bytes]
    decode: Callable[[bytes], Any]


def _jsonl(rows: Sequence[Trajectory]) -> bytes:
    """As compact as JSON is: no blanks, and float32 in the fewest digits that read back alike."""
    records = []
    for row in rows:
        record = to_record(row)
        record["behavior_logprobs"] = row.behavior_logprobs.astype(str).astype(float).tolist()
        record["loss_mask"] = row.loss_mask.astype(int).tolist()
        records.append(json.dumps(record, separators=(",", ":"), ensure_ascii=False))
    return "\n".join(records).encode()


def _from_jsonl(data: bytes) -> Any:
    rows = [json.loads(line) for line in data.splitlines()]
    kinds = {"tokens": np.int32, "loss_mask": bool, "behavior_logprobs": np.float32, "token_policy_version": np.int32}
    return [{**row, **{name: np.array(row[name], kind) for name, kind in kinds.items()}} for row in rows]


def table_of(rows: Sequence[Trajectory]) -> pa.Table:
    shard = decode(encode(rows))
    return pa.Table.from_arrays([shard.array(name) for name in SCHEMA.names], schema=SCHEMA)


def _arrow(rows: Sequence[Trajectory]) -> bytes:
    table = table_of(rows)
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _from_arrow(data: bytes) -> Any:
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    return [table.column(name).chunk(0).values.to_numpy(zero_copy_only=False) for name in TOKEN_COLUMNS]


def _from_shard(data: bytes) -> Any:
    rows = decode(data)
    assert not rows.faults
    return [rows.ragged(name) for name in TOKEN_COLUMNS]


FORMATS = {
    "shards": Format(encode, _from_shard),
    "JSON lines": Format(_jsonl, _from_jsonl),
    "pickle": Format(lambda rows: pickle.dumps(list(rows), pickle.HIGHEST_PROTOCOL), pickle.loads),
    "Arrow IPC": Format(_arrow, _from_arrow),
}


def _commit(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def bytes_by_column(rows: Sequence[Trajectory]) -> dict[str, float]:
    """Of a shard, per token."""
    import pyarrow.parquet as pq

    data = encode(rows)
    metadata = pq.ParquetFile(pa.BufferReader(data)).metadata
    found: dict[str, int] = {}
    for place in range(metadata.num_columns):
        column = metadata.row_group(0).column(place)
        name = column.path_in_schema.split(".")[0]
        found[name] = found.get(name, 0) + column.total_compressed_size
    tokens = sum(row.num_tokens for row in rows)
    found["(footer, digest)"] = len(data) - sum(found.values())
    return {name: size / tokens for name, size in sorted(found.items(), key=lambda item: -item[1])}


def _limits(path: Path, block: bytes) -> dict[str, float]:
    """Seconds for as many bytes as they come."""
    return {
        "disk write": _timed(lambda: _commit(path, block)),
        "disk read": _timed(path.read_bytes),
        "memory copy": _timed(lambda: np.frombuffer(block, np.uint8).copy()),
    }


def measure(*, quick: bool = False) -> tuple[dict[str, Any], list[Goal]]:
    trajectories = make_trajectories(1024 if quick else 4096)
    shards = [trajectories[i : i + ROWS_PER_SHARD] for i in range(0, len(trajectories), ROWS_PER_SHARD)]
    num_tokens = sum(row.num_tokens for row in trajectories)
    num_bytes = sum(table_of(rows).nbytes for rows in shards)
    seconds: dict[str, dict[str, list[float]]] = {name: {"write": [], "read": []} for name in FORMATS}
    sizes: dict[str, int] = {}
    limits: dict[str, list[float]] = {"memory copy": [], "disk write": [], "disk read": []}
    with tempfile.TemporaryDirectory(prefix="data-plane-") as folder:
        for turn in range(3 if quick else 6):
            for name, form in FORMATS.items():
                paths = [Path(folder, f"{name}-{number}") for number in range(len(shards))]
                wrote = sum(
                    _timed(lambda p=path, r=rows, f=form: _commit(p, f.encode(r)))  # type: ignore[misc]
                    for path, rows in zip(paths, shards, strict=True)
                )
                read = sum(_timed(lambda p=path, f=form: f.decode(p.read_bytes())) for path in paths)  # type: ignore[misc]
                sizes[name] = sum(path.stat().st_size for path in paths)
                if turn:
                    seconds[name]["write"].append(wrote)
                    seconds[name]["read"].append(read)
            taken = _limits(Path(folder, "limit"), np.random.default_rng(turn).bytes(num_bytes))
            if turn:
                for name, value in taken.items():
                    limits[name].append(value)
    figures = {
        "num_rows": len(trajectories),
        "num_tokens": num_tokens,
        "num_bytes": num_bytes,
        "formats": {
            name: {
                "bytes_per_token": sizes[name] / num_tokens,
                **{f"{verb}_mb_per_second": Sample.of(num_bytes / s / 1e6 for s in each) for verb, each in of.items()},
                **{
                    f"{verb}_rows_per_second": Sample.of(len(trajectories) / s for s in each)
                    for verb, each in of.items()
                },
            }
            for name, of in seconds.items()
        },
        "limits_mb_per_second": {name: Sample.of(num_bytes / s / 1e6 for s in each) for name, each in limits.items()},
        "bytes_per_token_by_column": bytes_by_column(shards[0]),
    }
    ratio = sizes["shards"] / sizes["JSON lines"]
    return figures, [Goal("bytes per token over JSON lines", ratio, GOAL_BYTES, at_least=False)]


def report(figures: dict[str, Any]) -> None:
    print(f"\nFormats: {figures['num_rows']:,} trajectories, {figures['num_tokens']:,} tokens, "
          f"{figures['num_bytes'] / 1e6:.0f} MB as Arrow")  # fmt: skip
    base = figures["formats"]["JSON lines"]
    titles = ("B/token", "write MB/s", "read MB/s", "read rows/s", "over JSON: write, read")
    print(f"  {'':12} {titles[0]:>8} {titles[1]:>22} {titles[2]:>22} {titles[3]:>12} {titles[4]:>23}")
    for name, of in figures["formats"].items():
        rates = [of[f"{verb}_mb_per_second"] for verb in ("write", "read")]
        write, read = (f"{rate:.1f}" for rate in rates)
        over = [
            rate.median / base[f"{verb}_mb_per_second"].median
            for verb, rate in zip(("write", "read"), rates, strict=True)
        ]
        print(
            f"  {name:12} {of['bytes_per_token']:8.2f} {write:>22} {read:>22} "
            f"{of['read_rows_per_second'].median:12,.0f} {f'{over[0]:.1f}, {over[1]:.1f}':>23}"
        )
    for name, rate in figures["limits_mb_per_second"].items():
        print(f"  {name:12} {rate:.0f} MB/s")
    columns = figures["bytes_per_token_by_column"].items()
    print("  a shard's bytes per token: " + ", ".join(f"{name} {size:.2f}" for name, size in list(columns)[:8]))

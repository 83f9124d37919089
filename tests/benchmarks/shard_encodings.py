"""How a shard is encoded: zstd's level, byte-stream-split for floats, dictionaries for versions, rows per group.

Each setting differs from the one in use in one thing. They take turns, so that a busy machine slows them alike; seconds are
of CPU, for encoding a table and for reading all its columns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.benchmarks.data_workload import make_trajectories
from tests.benchmarks.figures import Goal, Sample
from tests.benchmarks.shard_formats import ROWS_PER_SHARD, table_of
from tunix_core.storage import shards

IN_USE = "in use"
MAX_BYTES_OVER_BEST = 1.1
"""Of the setting in use over the smallest that neither writes nor reads more than twice as long."""


def settings() -> dict[str, dict[str, Any]]:
    """Name -> changes to the writer's own options."""
    names = shards.WRITER_OPTIONS["use_dictionary"]
    without = [name for name in names if not name.startswith("token_policy_version")]
    return {
        IN_USE: {},
        "uncompressed": {"compression": "none", "compression_level": None},
        "snappy": {"compression": "snappy", "compression_level": None},
        "lz4": {"compression": "lz4", "compression_level": None},
        "zstd 3": {"compression_level": 3},
        "zstd 9": {"compression_level": 9},
        "log probabilities plain": {"use_byte_stream_split": False},
        "versions plain": {"use_dictionary": without},
        "tokens in a dictionary": {"use_dictionary": [*names, "tokens.list.element"]},
        "tokens split by bytes": {"use_byte_stream_split": ["behavior_logprobs.list.element", "tokens.list.element"]},
        "64 rows a group": {"row_group_size": 64},
        "no statistics": {"write_statistics": False},
    }


def _written(table: pa.Table, changes: dict[str, Any]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **{"row_group_size": table.num_rows, **shards.WRITER_OPTIONS, **changes})
    return sink.getvalue().to_pybytes()


def _cpu_seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """And what the call returned."""
    started = time.process_time()
    result = call()
    return time.process_time() - started, result


def measure(*, quick: bool = False) -> tuple[dict[str, Any], list[Goal]]:
    rows = make_trajectories(ROWS_PER_SHARD)
    table, num_tokens = table_of(rows), sum(row.num_tokens for row in rows)
    seconds: dict[str, dict[str, list[float]]] = {name: {"write": [], "read": []} for name in settings()}
    sizes: dict[str, int] = {}
    for turn in range(8 if quick else 40):
        for name, changes in settings().items():
            wrote, data = _cpu_seconds(lambda c=changes: _written(table, c))  # type: ignore[misc]
            read, _ = _cpu_seconds(lambda d=data: pq.read_table(pa.BufferReader(d), use_threads=False))  # type: ignore[misc]
            sizes[name] = len(data)
            if turn:
                seconds[name]["write"].append(wrote)
                seconds[name]["read"].append(read)
    figures: dict[str, Any] = {
        name: {
            "bytes_per_token": sizes[name] / num_tokens,
            **{f"{verb}_seconds": Sample.of(each) for verb, each in of.items()},
        }
        for name, of in seconds.items()
    }
    own = figures[IN_USE]
    fair = [
        of["bytes_per_token"]
        for of in figures.values()
        if all(of[key].median <= 2 * own[key].median for key in ("write_seconds", "read_seconds"))
    ]
    ratio = own["bytes_per_token"] / min(fair)
    return {"settings": figures}, [
        Goal("bytes over the best setting of like speed", ratio, MAX_BYTES_OVER_BEST, at_least=False)
    ]


def report(figures: dict[str, Any]) -> None:
    own = figures["settings"][IN_USE]
    print("\nEncodings of a shard, over the one in use")
    print(f"  {'':24} {'B/token':>8} {'size':>6} {'write':>6} {'read':>6}")
    for name, of in figures["settings"].items():
        ratios = [of["bytes_per_token"] / own["bytes_per_token"]]
        ratios += [of[key].median / own[key].median for key in ("write_seconds", "read_seconds")]
        print(f"  {name:24} {of['bytes_per_token']:8.2f} " + " ".join(f"{ratio:6.2f}" for ratio in ratios))
    sample: Sample = own["write_seconds"]
    print(
        f"  in use: {sample.median * 1e3:.1f} ms to write, {own['read_seconds'].median * 1e3:.1f} ms to read, {ROWS_PER_SHARD} rows"
    )

"""Reward by environment, version and age over millions of rows, by DuckDB through the views of `tunixctl sql`.

Shards are written by the shard writer's own encoder, with short trajectories; what is counted as read is what the process's
reads from files returned.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.benchmarks.data_workload import ENVIRONMENTS, make_trajectories
from tests.benchmarks.figures import Goal, Sample
from tests.benchmarks.shard_formats import table_of
from tunix_core import paths
from tunix_core.archive.views import connect
from tunix_core.storage.shard_schema import SCHEMA, TOKEN_COLUMNS
from tunix_core.storage.shards import encode_table, versioned
from tunix_core.storage.store import ObjectStore, open_store
from tunix_core.types import Turn

ROWS_PER_SHARD = 8192
TOKENS_PER_ROW = 24
START = 1_800_000_000.0
GOAL_SECONDS = 10.0
GOAL_BYTES = 0.15
"""Of the files' bytes that a query over a few columns reads."""

QUERY = f"""
select environment, policy_version_min, cast(floor(({START} + 86400 - created_at) / 3600) as int) as age_hours,
       count(*) as num, avg(reward) as reward
from trajectories group by all order by all
"""
WHOLE = "select sum(list_sum(tokens)), sum(list_sum(behavior_logprobs)), sum(length(messages)) from trajectories"


def _template() -> pa.Table:
    """One shard's rows, short ones."""
    rows = [row for row in make_trajectories(2 * ROWS_PER_SHARD) if row.num_tokens >= TOKENS_PER_ROW]
    short = [
        dataclasses.replace(
            row,
            **{name: getattr(row, name)[:TOKENS_PER_ROW] for name in TOKEN_COLUMNS},
            turns=[Turn(role="prompt", start=0, end=TOKENS_PER_ROW)],
            messages=row.messages[:100],
        )
        for row in rows[:ROWS_PER_SHARD]
    ]
    return table_of(short)


def write_rows(store: ObjectStore, num_rows: int, seed: int = 0) -> dict[tuple[str, int, int], list[float]]:
    """Shards of a day; returns count and sum of the reward by environment, version and age in hours."""
    table, rng = _template(), np.random.default_rng(seed)
    expected: dict[tuple[str, int, int], list[float]] = {}
    for sequence in range(-(-num_rows // ROWS_PER_SHARD)):
        size = min(ROWS_PER_SHARD, num_rows - sequence * ROWS_PER_SHARD)
        at = 86_400 * (sequence * ROWS_PER_SHARD + np.arange(size)) / num_rows
        environment = rng.integers(0, len(ENVIRONMENTS), size)
        version, reward = (at // 1800).astype(np.int32), (rng.random(size) < 0.4).astype(float)
        changed = {
            "environment": pa.array(np.array(ENVIRONMENTS, object)[environment]),
            "policy_version_min": pa.array(version),
            "policy_version_max": pa.array(version),
            "created_at": pa.array(START + at),
            "reward": pa.array(reward),
            "trajectory_id": pa.array([f"{sequence:06d}-{row}" for row in range(size)]),
        }
        part = table.slice(0, size)
        for name, values in changed.items():
            part = part.set_column(part.schema.get_field_index(name), SCHEMA.field(name), values)
        key = paths.ShardName(paths.hour_partition(START + float(at[0])), "actor", "inc0", sequence).key
        store.put(key, encode_table(versioned(part)))
        age = np.floor((86_400 - at) / 3600).astype(int)
        for place in np.unique(np.stack([environment, version, age]), axis=1).T.tolist():
            chosen = (environment == place[0]) & (version == place[1]) & (age == place[2])
            entry = expected.setdefault((ENVIRONMENTS[place[0]], place[1], place[2]), [0, 0.0])
            entry[0] += int(chosen.sum())
            entry[1] += float(reward[chosen].sum())
    return expected


def _bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def measure(*, quick: bool = False) -> tuple[dict[str, Any], list[Goal]]:
    num_rows = 1_000_000 if quick else 10_000_000
    with tempfile.TemporaryDirectory(prefix="data-plane-") as folder:
        store = open_store(folder)
        started = time.perf_counter()
        expected = write_rows(store, num_rows)
        written_seconds = time.perf_counter() - started
        num_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*.parquet"))
        connection = connect(store)
        seconds, whole = [], 0.0
        read = 0
        for _ in range(3):
            before, started = _bytes_read(), time.perf_counter()
            answer = connection.execute(QUERY).fetchall()
            seconds.append(time.perf_counter() - started)
            read = max(read, _bytes_read() - before)
        started = time.perf_counter()
        connection.execute(WHOLE).fetchall()
        whole = time.perf_counter() - started
        connection.close()
    found = {(environment, version, age): [num, num * reward] for environment, version, age, num, reward in answer}
    assert found.keys() == expected.keys(), "groups differ"
    assert all(np.allclose(found[key], expected[key]) for key in expected), "figures differ"
    figures = {
        "num_rows": num_rows,
        "num_bytes": num_bytes,
        "written_seconds": written_seconds,
        "query_seconds": Sample.of(seconds),
        "whole_seconds": whole,
        "bytes_read": read,
        "num_groups": len(answer),
    }
    return figures, [
        Goal("seconds of the query", figures["query_seconds"].median, GOAL_SECONDS, at_least=False),
        Goal("bytes that it reads over the files'", read / num_bytes, GOAL_BYTES, at_least=False),
    ]


def report(figures: dict[str, Any]) -> None:
    print(f"\nQuery: {figures['num_rows']:,} rows in {figures['num_bytes'] / 1e6:,.0f} MB "
          f"(written in {figures['written_seconds']:.0f} s)")  # fmt: skip
    print(f"  reward by environment, version and age: {figures['query_seconds']:.2f} s, {figures['num_groups']} groups, "
          f"{figures['bytes_read'] / 1e6:.0f} MB read ({figures['bytes_read'] / figures['num_bytes']:.1%})")  # fmt: skip
    ratio = figures["whole_seconds"] / figures["query_seconds"].median
    print(f"  all tokens, log probabilities and texts: {figures['whole_seconds']:.2f} s, {ratio:.1f} times as long")

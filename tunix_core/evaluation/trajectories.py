"""What actors did in an hour, per policy version: a table from the trajectory shards alone.

One evaluation of one hour is a folder

    evaluations/trajectories/<evaluator version>-<code digest>/date=…/hour=…/<input digest>/
        part.parquet     one row per (environment, policy version)
        MANIFEST.json    the shards it read and those it could not; written last and create-only

The input digest names the shards, so the same hour with the same shards is the same folder and is
never written twice, while an hour that has grown gets a new folder. Readers take each hour's newest
manifest. An hour without rows has a manifest without a part: it was looked at.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import hashlib
import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tunix_core import paths
from tunix_core.errors import ConfigError, CorruptObject, ObjectExists
from tunix_core.evaluation.digest import evaluator_name, input_digest
from tunix_core.storage.shard_archive import ShardArchive
from tunix_core.storage.shards import ShardRows
from tunix_core.storage.store import ObjectStore, from_json, to_json
from tunix_core.types import TRUNCATIONS

NAME = "trajectories"
EVALUATOR_VERSION = 1
PART = "part.parquet"
_MAX_HOURS = 24 * 366
_SHARDS_AT_A_TIME = 64

SCHEMA = pa.schema(
    [
        ("environment", pa.string()),
        ("policy_version", pa.int64()),
        ("num_episodes", pa.int64()),
        ("num_trajectories", pa.int64()),
        ("num_tokens", pa.int64()),
        ("num_policy_tokens", pa.int64()),
        ("mean_reward", pa.float64()),
        ("success_share", pa.float64()),
        ("mean_turns", pa.float64()),
        ("num_tool_calls", pa.int64()),
        ("tool_ok_share", pa.float64()),
        ("truncated_share", pa.float64()),
        ("failed_share", pa.float64()),
        ("generation_seconds", pa.float64()),
        ("environment_seconds", pa.float64()),
    ]
)
"""`policy_version` is a trajectory's oldest one; means and shares are over episodes, of which a fork
counts once, by its last trajectory. A share of no tool calls is NaN."""

SUCCESS_COMPONENT = "answer"
"""Reward component that tells whether a task was solved; without it a full reward does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HourEvaluation:
    """What one call found or wrote for one hour."""

    partition: str
    folder: str
    num_shards: int
    skipped: dict[str, str]
    """Shard -> why it could not be read."""
    num_skipped_rows: int
    written: bool
    """False when this very evaluation was there already."""
    table: pa.Table


class _Counts:
    """Sums per (environment, policy version) over shards, a few arrays per shard."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], np.ndarray] = collections.defaultdict(lambda: np.zeros(len(_SUMS)))

    def add(self, rows: ShardRows) -> int:
        """Add the usable rows of one shard; returns how many were not usable."""
        good = np.ones(rows.num_rows, bool)
        good[list(rows.faults)] = False
        if not good.any():
            return int((~good).sum())
        values = _row_values(rows)[good]
        environments, environment_of = np.unique(rows.column("environment")[good].astype(str), return_inverse=True)
        versions = rows.column("policy_version_min")[good].astype(np.int64)
        keys, group_of = np.unique(np.stack([environment_of, versions], axis=1), axis=0, return_inverse=True)
        sums = np.zeros((len(keys), len(_SUMS)))
        np.add.at(sums, group_of.reshape(-1), values)
        for (environment, version), total in zip(keys.tolist(), sums, strict=True):
            self._sums[str(environments[environment]), version] += total
        return int((~good).sum())

    def table(self) -> pa.Table:
        records = []
        for (environment, version), values in sorted(self._sums.items()):
            total = dict(zip(_SUMS, values.tolist(), strict=True))
            episodes = total["episodes"]
            records.append(
                {
                    "environment": environment,
                    "policy_version": version,
                    "num_episodes": int(episodes),
                    "num_trajectories": int(total["trajectories"]),
                    "num_tokens": int(total["tokens"]),
                    "num_policy_tokens": int(total["policy_tokens"]),
                    "mean_reward": _share(total["reward"], episodes),
                    "success_share": _share(total["success"], episodes),
                    "mean_turns": _share(total["turns"], episodes),
                    "num_tool_calls": int(total["tool_calls"]),
                    "tool_ok_share": _share(total["tool_ok"], total["tool_calls"]),
                    "truncated_share": _share(total["truncated"], episodes),
                    "failed_share": _share(total["failed"], episodes),
                    "generation_seconds": total["generation_seconds"],
                    "environment_seconds": total["environment_seconds"],
                }
            )
        return pa.Table.from_pylist(records, schema=SCHEMA)


_SUMS = (
    *("episodes", "trajectories", "tokens", "policy_tokens", "reward", "success", "turns", "tool_calls", "tool_ok"),
    *("truncated", "failed", "generation_seconds", "environment_seconds"),
)


def _share(total: float, count: float) -> float:
    return total / count if count else float("nan")


def _row_values(rows: ShardRows) -> np.ndarray:
    """[N, len(_SUMS)] of one shard. Forks of an episode lie in one shard (a shard is whole groups), each turn in one fork."""
    last = _last_forks(rows)
    turns_of, roles = rows.turn_column("role")
    is_call = rows.turn_column("tool_name")[1] != ""
    is_ok = is_call & rows.turn_column("tool_ok")[1].astype(bool)
    reasons = rows.column("finish_reason")
    columns = {
        "episodes": last,
        "trajectories": np.ones(rows.num_rows),
        "tokens": rows.column("num_tokens"),
        "policy_tokens": rows.column("num_policy_tokens"),
        "reward": rows.column("reward") * last,
        "success": successes(rows) * last,
        "turns": _sum_lists(turns_of, roles == "policy"),
        "tool_calls": _sum_lists(turns_of, is_call),
        "tool_ok": _sum_lists(turns_of, is_ok),
        "truncated": np.isin(reasons, TRUNCATIONS) * last,
        "failed": (reasons == "failed") * last,
        "generation_seconds": rows.column("generation_seconds"),
        "environment_seconds": rows.column("environment_seconds"),
    }
    return np.stack([np.asarray(columns[name], np.float64) for name in _SUMS], axis=1)


def _last_forks(rows: ShardRows) -> np.ndarray:
    """[N] 1 where the row is its episode's last trajectory."""
    forks = rows.column("fork_index")
    last = np.zeros(rows.num_rows)
    newest: dict[str, int] = {}
    for row, episode in enumerate(rows.column("episode_id").tolist()):
        if episode not in newest or forks[row] > forks[newest[episode]]:
            newest[episode] = row
    last[list(newest.values())] = 1.0
    return last


def _sum_lists(offsets: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[N] sums of the slices `values[offsets[i]:offsets[i + 1]]`, empty ones included."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return total[offsets[1:]] - total[offsets[:-1]]


def successes(rows: ShardRows) -> np.ndarray:
    """[N] 1 where the task was solved."""
    answers, rewards = rows.component(SUCCESS_COMPONENT), rows.column("reward")
    return (np.where(np.isnan(answers), rewards, answers) >= 1.0).astype(np.float64)


def evaluator() -> str:
    return evaluator_name(EVALUATOR_VERSION, __file__)


def hours_of(start: dt.datetime, end: dt.datetime) -> Iterator[str]:
    """Partitions of the hours that overlap `[start, end)`, in order.

    Raises:
        ConfigError: times without a zone, an empty interval, or one of more than a year.
    """
    for field, value in (("start", start), ("end", end)):
        if value.tzinfo is None:
            raise ConfigError(field, value.isoformat(), "a time with its zone", "Append Z or +00:00.")
    if end <= start:
        raise ConfigError(
            "end", end.isoformat(), f"a time after start = {start.isoformat()}", "Intervals are half open."
        )
    hour = start.astimezone(dt.UTC).replace(minute=0, second=0, microsecond=0)
    if end - hour > dt.timedelta(hours=_MAX_HOURS):
        raise ConfigError("end", end.isoformat(), f"at most {_MAX_HOURS} hours after start", "Split the interval.")
    while hour < end:
        yield paths.hour_partition(hour.timestamp())
        hour += dt.timedelta(hours=1)


def evaluate_interval(
    store: ObjectStore, start: dt.datetime, end: dt.datetime, *, clock: Callable[[], float] = time.time
) -> list[HourEvaluation]:
    """Evaluate every hour that overlaps `[start, end)`."""
    return [evaluate_hour(store, partition, clock=clock) for partition in hours_of(start, end)]


def evaluate_hour(store: ObjectStore, partition: str, *, clock: Callable[[], float] = time.time) -> HourEvaluation:
    """Evaluate the shards that the hour holds now; the same shards again only read the manifest.

    Args:
        store: of the run.
        partition: `date=YYYY-MM-DD/hour=HH`.
        clock: seconds since the epoch; stamps the manifest.

    Raises:
        StoreError: the store failed; nothing partial is visible, try again.
    """
    archive = ShardArchive(store)
    shards = archive.keys(partition)
    digest = input_digest(shards)
    folder = paths.evaluation(NAME, evaluator(), partition, digest)
    if store.exists(folder + paths.MANIFEST):
        return _read(store, partition, folder)
    counts, skipped, num_skipped_rows = _count(archive, shards)
    table = counts.table()
    manifest: dict[str, Any] = {
        "partition": partition,
        "evaluator": evaluator(),
        "shards": shards,
        "skipped": skipped,
        "num_skipped_rows": num_skipped_rows,
        "num_rows": table.num_rows,
        "created_at": clock(),
        "sha256": None,
    }
    if table.num_rows:
        manifest["sha256"] = hashlib.sha256(_put_part(store, folder + PART, table)).hexdigest()
    try:
        store.put_if_absent(folder + paths.MANIFEST, to_json(manifest))
    except ObjectExists:
        return _read(store, partition, folder)
    return dataclasses.replace(_read(store, partition, folder), written=True)


def _count(archive: ShardArchive, shards: Sequence[str]) -> tuple[_Counts, dict[str, str], int]:
    counts, num_skipped_rows = _Counts(), 0
    skipped = dict.fromkeys(archive.strays, "not a shard's name")
    for shard in archive.read(shards):
        if shard.rows is None:
            skipped[shard.key] = shard.fault
        else:
            num_skipped_rows += counts.add(shard.rows)
    return counts, skipped, num_skipped_rows


def _put_part(store: ObjectStore, key: str, table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    try:
        store.put_if_absent(key, sink.getvalue())
    except ObjectExists:  # of an attempt over the same shards that died before its manifest
        return store.get(key)
    return sink.getvalue()


def _read(store: ObjectStore, partition: str, folder: str) -> HourEvaluation:
    manifest = from_json(folder + paths.MANIFEST, store.get(folder + paths.MANIFEST))
    table = SCHEMA.empty_table()
    if manifest["num_rows"]:
        data = store.get(folder + PART)
        received = hashlib.sha256(data).hexdigest()
        if received != manifest["sha256"]:
            raise CorruptObject(f"{folder}{PART}: received sha256 {received}, accepted {manifest['sha256']}")
        table = pq.read_table(pa.BufferReader(data))
    return HourEvaluation(
        partition=partition,
        folder=folder,
        num_shards=len(manifest["shards"]),
        skipped=dict(manifest["skipped"]),
        num_skipped_rows=int(manifest["num_skipped_rows"]),
        written=False,
        table=table,
    )


def read_evaluations(store: ObjectStore) -> dict[str, HourEvaluation]:
    """Every hour's newest evaluation, by partition."""
    newest: dict[str, tuple[float, str]] = {}
    for key in store.list_after(f"{paths.EVALUATIONS}{NAME}/"):
        if key.endswith(f"/{paths.MANIFEST}"):
            manifest = json.loads(store.get(key))
            found = (float(manifest["created_at"]), key.removesuffix(paths.MANIFEST))
            partition = str(manifest["partition"])
            if partition not in newest or found > newest[partition]:
                newest[partition] = found
    return {partition: _read(store, partition, folder) for partition, (_, folder) in sorted(newest.items())}

"""Which saved trajectories: a filter, and a walk over the shards that skips what it cannot hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from tunix_core import paths
from tunix_core.storage.shard_archive import ShardArchive
from tunix_core.storage.shards import ShardRows
from tunix_core.storage.store import ObjectStore
from tunix_core.types import Trajectory
from tunix_core.validation import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """Trajectories that meet every condition; a condition left as it is asks for nothing."""

    trajectory: str = ""
    """Its id."""
    environment: str = ""
    split: str = ""
    finish_reason: str = ""
    actor: str = ""
    group: str = ""
    solved: bool | None = None
    """Reward at least 1, or below."""
    min_reward: float = -math.inf
    max_reward: float = math.inf
    min_version: int = -1
    """Of the newest policy token."""
    max_version: int = 2**31 - 1
    """Of the oldest policy token."""
    since: float = 0.0
    """Seconds since the epoch, by the writer's clock."""
    until: float = math.inf

    def __post_init__(self) -> None:
        for low, high in (("min_reward", "max_reward"), ("min_version", "max_version"), ("since", "until")):
            require(
                getattr(self, low) <= getattr(self, high),
                low,
                getattr(self, low),
                f"at most {high} = {getattr(self, high)}",
                "Nothing can lie between them: swap them.",
            )

    def matches(self, rows: ShardRows) -> np.ndarray:
        """bool [N], faulty rows excluded."""
        kept = np.ones(rows.num_rows, bool)
        kept[list(rows.faults)] = False
        for column, wanted in (
            ("trajectory_id", self.trajectory),
            ("environment", self.environment),
            ("split", self.split),
            ("finish_reason", self.finish_reason),
            ("actor_id", self.actor),
            ("group_id", self.group),
        ):
            if wanted:
                kept &= rows.column(column) == wanted
        reward, created = rows.column("reward"), rows.column("created_at")
        kept &= (reward >= self.min_reward) & (reward <= self.max_reward)
        if self.solved is not None:
            kept &= (reward >= 1) == self.solved
        kept &= rows.column("policy_version_max") >= self.min_version
        kept &= rows.column("policy_version_min") <= self.max_version
        return kept & (created >= self.since) & (created <= self.until)


class Found(NamedTuple):
    """One trajectory and where it lies."""

    shard: str
    row: int
    trajectory: Trajectory


def select(
    store: ObjectStore,
    selection: Selection,
    *,
    newest_first: bool = False,
    refused: Callable[[str], None] = lambda _reason: None,
) -> Iterator[Found]:
    """Every saved trajectory that the selection holds, shard by shard.

    Args:
        refused: told of each shard and row that cannot be read.
    """
    archive = ShardArchive(store)
    keys = archive.keys(chosen=lambda hour: _may_hold(selection, hour))
    for shard in archive.read(sorted(keys, reverse=newest_first)):
        key, rows = shard.key, shard.rows
        if rows is None:
            refused(f"{key}: {shard.fault}")
            continue
        for row, reason in sorted(rows.faults.items()):
            refused(f"{key} row {row}: {reason}")
        for row in np.flatnonzero(selection.matches(rows)).tolist():
            yield Found(key, row, rows.trajectory(row))


def _may_hold(selection: Selection, hour: str) -> bool:
    """By the hour that it was written in. Rows are created before their shard, at most a day; clocks differ by less than an hour."""
    bounds = selection.since - 3600, selection.until + 24 * 3600
    since, until = (paths.hour_partition(max(0.0, at)) if math.isfinite(at) else "" for at in bounds)
    return (not since or hour >= since) and (not until or hour <= until)

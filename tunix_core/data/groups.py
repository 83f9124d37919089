"""A group of trajectories in the buffer, and which groups make a batch: pure functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import numpy as np

from tunix_core.data.rows import Rows
from tunix_core.rl.staleness import staleness


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The trajectories of one task instance that can be trained on, their advantages settled."""

    group_id: str
    rows: Rows
    advantages: np.ndarray
    """float32 [G'], or [G', most turns] where each policy turn has its own; 0 behind a trajectory's last one."""
    arrival: int
    """Rises with every group that enters the buffer: breaks ties, so that order is determined."""
    num_bytes: int
    round: int = 0
    """Of several feeds: in which of this life's they tell each other of it. All know those that a life began with."""

    @functools.cached_property
    def version_min(self) -> int:
        """Oldest policy version among the group's policy tokens: a group is dropped as a whole."""
        return oldest_version(self.rows.version_min)

    @functools.cached_property
    def version_sum(self) -> tuple[int, int]:
        """Sum of the rows' oldest versions, over the rows that have policy tokens; and how many they are."""
        with_policy = self.rows.version_min[self.rows.version_min >= 0]
        return int(with_policy.sum()), len(with_policy)


def oldest_version(version_min: np.ndarray) -> int:
    """Of the rows that have policy tokens at all; -1 if none has."""
    with_policy = version_min[version_min >= 0]
    return int(with_policy.min()) if len(with_policy) else -1


def trajectory_staleness(version_min: np.ndarray, clock: int) -> np.ndarray:
    """[N] clock before the consuming step minus the oldest version of each trajectory that has policy tokens."""
    return staleness(clock, version_min[version_min >= 0])


def choose(
    groups: Sequence[Group],
    num_groups: int,
    clock: int,
    *,
    order: Literal["oldest_first", "freshest_first"],
    max_mean_staleness: float,
) -> tuple[list[Group] | None, float]:
    """The next batch out of groups that are all within the bound.

    Oldest first takes as many of the oldest groups as keep the batch's mean staleness within its
    limit, and fills up with the freshest; so waiting for fresher data helps, and nothing has to be
    evicted for the mean's sake.

    Returns:
        The groups in order of consumption, or None where they are too few or too stale on the
        mean; and the mean staleness of the best batch there is (0 where they are too few).
    """
    if len(groups) < num_groups:
        return None, 0.0
    by_age = sorted(groups, key=lambda g: (g.version_min, g.arrival))
    version_sums, counts = np.array([g.version_sum for g in by_age], np.float64).T
    sums = clock * counts - version_sums
    # Row k: the k oldest and the num_groups - k freshest.
    k = np.arange(num_groups + 1)
    if order == "freshest_first":
        k = np.zeros(1, np.int64)

    def total(values: np.ndarray) -> np.ndarray:
        prefix = np.r_[0.0, np.cumsum(values)]
        return prefix[k] + prefix[-1] - prefix[len(values) - num_groups + k]

    means = total(sums) / total(counts)
    allowed = np.flatnonzero(means <= max_mean_staleness)
    if len(allowed) == 0:
        return None, float(means.min())
    best = int(allowed[-1])
    oldest = int(k[best])
    freshest = by_age[len(by_age) - (num_groups - oldest) :]
    chosen = by_age[:oldest] + (freshest[::-1] if order == "freshest_first" else freshest)
    return chosen, float(means[best])

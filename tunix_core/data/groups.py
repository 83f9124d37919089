"""A group of trajectories in the buffer, and which groups make a batch: pure functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from tunix_core.data.rows import Rows
from tunix_core.rl.batching import choose_groups
from tunix_core.rl.staleness import staleness
from tunix_core.types import Order


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
    uses: int = 0
    """Steps that have trained on it."""
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

    @functools.cached_property
    def magnitude(self) -> float:
        """Mean over its trajectories of the largest |advantage| among their turns."""
        by_turn = np.abs(self.advantages.astype(np.float64)).reshape(len(self.advantages), -1)
        return float(by_turn.max(axis=1).mean())


def oldest_version(version_min: np.ndarray) -> int:
    """Of the rows that have policy tokens at all; -1 if none has."""
    with_policy = version_min[version_min >= 0]
    return int(with_policy.min()) if len(with_policy) else -1


def trajectory_staleness(version_min: np.ndarray, clock: int) -> np.ndarray:
    """[N] clock before the consuming step minus the oldest version of each trajectory that has policy tokens."""
    return staleness(clock, version_min[version_min >= 0])


def choose(
    groups: Sequence[Group], num_groups: int, clock: int, *, order: Order, max_mean_staleness: float
) -> tuple[list[Group] | None, float]:
    """See `rl.batching.choose_groups`."""
    by_arrival = sorted(groups, key=lambda group: group.arrival)
    sums = np.array([group.version_sum for group in by_arrival], np.int64).reshape(-1, 2)
    chosen, mean = choose_groups(
        np.array([group.version_min for group in by_arrival], np.int64),
        sums[:, 0],
        sums[:, 1],
        num_groups,
        clock,
        order=order,
        max_mean_staleness=max_mean_staleness,
        num_uses=np.array([group.uses for group in by_arrival], np.int64),
        magnitude=np.array([group.magnitude for group in by_arrival], np.float64),
    )
    return None if chosen is None else [by_arrival[i] for i in chosen], mean

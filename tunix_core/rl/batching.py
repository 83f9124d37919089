"""Which of the groups that wait make the next batch. No JAX, no I/O: the buffer and the simulator run the same code."""

from __future__ import annotations

from typing import Literal

import numpy as np

Order = Literal["oldest_first", "freshest_first"]


def choose_groups(
    version_min: np.ndarray,
    version_sum: np.ndarray,
    num_versions: np.ndarray,
    num_groups: int,
    clock: int,
    *,
    order: Order,
    max_mean_staleness: float,
) -> tuple[np.ndarray | None, float]:
    """The next batch out of N groups that are all within the bound.

    Oldest first takes as many of the oldest groups as keep the batch's mean staleness within its
    limit, and fills up with the freshest; so waiting for fresher data helps, and nothing has to be
    evicted for the mean's sake.

    Args:
        version_min: [N] the oldest policy version of each group, in the order in which they arrived.
        version_sum: [N] sum over each group's trajectories of their oldest versions.
        num_versions: [N] how many trajectories that sum counts.
        num_groups: of a batch.
        clock: of the step that would consume it.
        max_mean_staleness: of the batch, over its trajectories, in steps.

    Returns:
        Indices [num_groups] in order of consumption, or None where the groups are too few or too stale
        on the mean; and the mean staleness of the best batch there is (0 where they are too few).
    """
    if len(version_min) < num_groups:
        return None, 0.0
    by_age = np.argsort(version_min, kind="stable")
    counts = num_versions[by_age].astype(np.float64)
    sums = clock * counts - version_sum[by_age]
    # Row k: the k oldest and the num_groups - k freshest.
    k = np.arange(num_groups + 1) if order == "oldest_first" else np.zeros(1, np.int64)

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
    chosen = np.concatenate([by_age[:oldest], freshest[::-1] if order == "freshest_first" else freshest])
    return chosen, float(means[best])

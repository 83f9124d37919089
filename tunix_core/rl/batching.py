"""Which of the groups that wait make the next batch. No JAX, no I/O: the buffer and the simulator run the same code."""

from __future__ import annotations

import numpy as np

from tunix_core.types import Order


def choose_groups(
    version_min: np.ndarray,
    version_sum: np.ndarray,
    num_versions: np.ndarray,
    num_groups: int,
    clock: int,
    *,
    order: Order,
    max_mean_staleness: float,
    num_uses: np.ndarray | None = None,
    magnitude: np.ndarray | None = None,
) -> tuple[np.ndarray | None, float]:
    """The next batch out of N groups that are all within the bound.

    Groups that were used less often come first, then what `order` says: so a group is used again only where the
    learner would wait otherwise, and nothing grows stale unused behind it. As many of the first ones as keep the
    batch's mean staleness within its limit are taken, and it is filled up with the freshest; so waiting for fresher
    data helps, and nothing has to be evicted for the mean's sake.

    Args:
        version_min: [N] the oldest policy version of each group, in the order in which they arrived.
        version_sum: [N] sum over each group's trajectories of their oldest versions.
        num_versions: [N] how many trajectories that sum counts.
        num_groups: of a batch.
        clock: of the step that would consume it.
        order: of groups that were used equally often. Ties go to the first that arrived; freshest first, to the last.
        max_mean_staleness: of the batch, over its trajectories, in steps.
        num_uses: [N] steps that trained on each group before; None: none did.
        magnitude: [N] of each group's advantages, for `largest_advantage_first`.

    Returns:
        Indices [num_groups] in order of consumption, or None where the groups are too few or too stale
        on the mean; and the mean staleness of the best batch there is (0 where they are too few).
    """
    if len(version_min) < num_groups:
        return None, 0.0
    by_age = np.argsort(version_min, kind="stable")
    first = _by_priority(by_age, order, magnitude)
    if num_uses is not None:
        first = first[np.argsort(num_uses[first], kind="stable")]
    first = first[:num_groups]
    counts = num_versions.astype(np.float64)
    ages = clock * counts - version_sum
    means = _means(first, by_age, ages, counts)
    allowed = np.flatnonzero(means <= max_mean_staleness)
    if len(allowed) == 0:
        return None, float(means.min())
    k = int(allowed[-1])
    left = by_age[~np.isin(by_age, first[:k])]
    return np.concatenate([first[:k], left[len(left) - (num_groups - k) :]]), float(means[k])


def _by_priority(by_age: np.ndarray, order: Order, magnitude: np.ndarray | None) -> np.ndarray:
    """[N] all groups, as `order` has them."""
    if order == "oldest_first":
        return by_age
    if order == "freshest_first":
        return by_age[::-1]
    assert magnitude is not None, "largest_advantage_first needs the advantages"
    return np.argsort(-magnitude, kind="stable")


def _means(first: np.ndarray, by_age: np.ndarray, ages: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[n + 1] mean staleness of the first k of n groups and the n - k freshest of the others, for k from 0 to n."""
    num_groups = len(first)
    freshest = by_age[len(by_age) - num_groups :]
    # One more of the first ones takes the place of the least fresh one that fills up; unless it fills up already.
    filling = np.zeros(len(by_age), bool)
    filling[freshest] = True
    replaced = np.empty(num_groups, np.int64)
    place = 0
    for k, group in enumerate(first.tolist()):
        if filling[group]:
            replaced[k] = group
        else:
            while not filling[freshest[place]]:
                place += 1
            replaced[k] = freshest[place]
        filling[replaced[k]] = False

    def total(values: np.ndarray) -> np.ndarray:
        return values[freshest].sum() + np.r_[0.0, np.cumsum(values[first] - values[replaced])]

    means: np.ndarray = total(ages) / total(counts)
    return means

"""How old a trajectory is when a step consumes it. No JAX: actors, reports and evaluations use it too."""

from __future__ import annotations

import numpy as np


def staleness(clock: int | np.ndarray, policy_version_min: int | np.ndarray) -> np.ndarray:
    """Clock before the consuming step minus the oldest version among the policy tokens, in steps.

    On-policy is 0; time spent in queues counts, because the clock goes on meanwhile. A trajectory
    without policy tokens (version -1) carries no gradient and counts as on-policy.

    Args:
        clock, policy_version_min: scalars or broadcastable arrays of integers.

    Returns:
        int64.
    """
    oldest = np.asarray(policy_version_min, np.int64)
    return np.where(oldest < 0, 0, np.asarray(clock, np.int64) - oldest)


def within_bound(clock: int | np.ndarray, policy_version_min: int | np.ndarray, max_staleness: int) -> np.ndarray:
    """Whether a step at `clock` may consume it: staleness at most `max_staleness`."""
    return staleness(clock, policy_version_min) <= max_staleness


def mean_staleness(clock: int, policy_version_min: np.ndarray) -> float:
    """Mean over the trajectories [N] that have policy tokens, in steps; 0 if none has."""
    versions = np.asarray(policy_version_min, np.int64)
    with_policy = versions[versions >= 0]
    return float((clock - with_policy).mean()) if len(with_policy) else 0.0


def histogram(values: np.ndarray, max_staleness: int) -> np.ndarray:
    """Counts `[max_staleness + 2]` of staleness 0, 1, …, max_staleness, and above it (the last).

    Raises:
        ValueError: a negative staleness: the policy would be newer than the clock.
    """
    steps = np.asarray(values, np.int64)
    if (steps < 0).any():
        raise ValueError(
            f"staleness {steps.min()}: accepted are 0 and above. A policy version is ahead of the clock; "
            "count against the clock before the consuming step."
        )
    return np.bincount(np.minimum(steps, max_staleness + 1), minlength=max_staleness + 2)

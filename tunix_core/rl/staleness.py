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


def histogram(values: np.ndarray, max_staleness: int) -> np.ndarray:
    """Counts `[max_staleness + 2]` of staleness 0, 1, …, max_staleness, and above it (the last)."""
    clipped = np.clip(np.asarray(values, np.int64), 0, max_staleness + 1)
    return np.bincount(clipped, minlength=max_staleness + 2)

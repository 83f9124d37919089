"""Sums over the trajectories of packed windows, given back to every token of theirs.

A trajectory lies whole inside one window, so its sum never leaves the device that holds the window.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def segment_sum(values: jax.Array, mask: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Each token's trajectory's sum of `values` over its tokens where `mask` is true.

    Args:
        values: float `[N, W]`; masked entries may hold anything.
        mask: bool `[N, W]`.
        segment_ids: int `[N, W]` in 0 to W; 0 is padding, which is a segment of its own.

    Returns:
        `[N, W]`, constant over a segment.
    """
    kept = jnp.where(mask, values, 0)

    def window(row: jax.Array, ids: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(row, ids, num_segments=row.shape[0] + 1)[ids]

    return jax.vmap(window)(kept, segment_ids)


def segment_mean(values: jax.Array, mask: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """As `segment_sum`, divided by the trajectory's number of tokens where `mask` is true; 0 where it has none."""
    count = segment_sum(jnp.ones_like(values), mask, segment_ids)
    return segment_sum(values, mask, segment_ids) / jnp.maximum(count, 1)

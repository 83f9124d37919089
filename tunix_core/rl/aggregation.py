"""From values per token to a scalar."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def masked_sum(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Sum where `mask` is true. A masked value, even NaN, adds nothing to it or to its gradient.

    (The gradient to a masked `values` entry is an exact zero; what computed that entry must be finite.)
    """
    return jnp.where(mask, values, 0).sum()

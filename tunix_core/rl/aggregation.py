"""From values per token to a scalar, without letting a masked token matter.

A masked entry may hold anything, NaN and infinities included. It takes two selections to keep it out
of value *and* gradient: `where_policy` on what goes into a formula (else 0 times NaN comes back
through the chain rule), `masked_sum` on what comes out of it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def where_policy(mask: ArrayLike, values: ArrayLike, neutral: ArrayLike = 0.0) -> jax.Array:
    """`values` where `mask` is true, `neutral` (harmless in the formula to come) elsewhere."""
    return jnp.where(mask, values, neutral)


def masked_sum(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Sum over all entries where `mask` is true; a masked value adds exactly 0 to it and to its gradient.

    To make a mean of it, divide by one global denominator, known before the first micro-batch, so
    that the parts of micro-batches and devices just add.
    """
    return jnp.where(mask, values, 0).sum()

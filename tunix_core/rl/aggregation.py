"""From values per token to a scalar, without letting a masked token matter.

A masked entry may hold anything, NaN and infinities included. It takes two selections to keep it out
of value *and* gradient: `where_policy` on what goes into a formula (else 0 times NaN comes back
through the chain rule), `masked_sum` on what comes out of it.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tunix_core.rl.segments import segment_sum

Aggregation = Literal["token_mean", "sequence_mean", "constant_length"]


def where_policy(mask: ArrayLike, values: ArrayLike, neutral: ArrayLike = 0.0) -> jax.Array:
    """`values` where `mask` is true, `neutral` (harmless in the formula to come) elsewhere."""
    return jnp.where(mask, values, neutral)


def masked_sum(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Sum over all entries where `mask` is true; a masked value adds exactly 0 to it and to its gradient.

    To make a mean of it, divide by one global denominator, known before the first micro-batch, so
    that the parts of micro-batches and devices just add.
    """
    return jnp.where(mask, values, 0).sum()


def token_weights(aggregation: Aggregation, mask: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Weight of each policy token in the sum that `denominator` divides; float32 `[N, W]`.

    1, except for the mean over trajectories of their means: one over the trajectory's policy tokens.
    """
    ones = jnp.ones(mask.shape, jnp.float32)
    if aggregation != "sequence_mean":
        return ones
    return ones / jnp.maximum(segment_sum(ones, mask, segment_ids), 1)


def denominator(aggregation: Aggregation, *, num_policy_tokens: int, num_sequences: int, constant_tokens: int) -> float:
    """What the weighted sum over the whole batch is divided by.

    GRPO averages over each trajectory's tokens and then over trajectories (arXiv:2402.03300, eq. 3), DAPO over all
    tokens (arXiv:2503.14476, section 3.3), Dr.GRPO divides sums by a constant length (arXiv:2503.20783, section 3.1).

    Args:
        num_sequences: trajectories with at least one policy token.
        constant_tokens: the constant length.
    """
    if aggregation == "token_mean":
        return float(num_policy_tokens)
    return float(num_sequences * (constant_tokens if aggregation == "constant_length" else 1))

"""Weights that account for tokens having come from another policy than the one being updated."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def truncated_importance_weights(
    proximal_logprobs: jax.Array, behavior_logprobs: jax.Array, truncation: float
) -> jax.Array:
    """min(proximal / behavior, truncation) per token: a constant, no gradient flows through it.

    Truncated importance sampling (Ionides, 2008), as used between sampler and learner.
    """
    ratio = jnp.exp(proximal_logprobs - behavior_logprobs)
    return jax.lax.stop_gradient(jnp.minimum(ratio, truncation))

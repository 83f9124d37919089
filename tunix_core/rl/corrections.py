"""Weights that account for tokens having come from another policy than the one being updated.

r = proximal / behavior at the sampled token. All weights are constants: no gradient flows through them.
A truncated weight bounds the variance and keeps every token; a masked one drops what lies outside a
band, where sampler and learner disagree about what was likely at all.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tunix_core.rl.segments import segment_mean, segment_sum


def truncated_importance_weights(
    proximal_logprobs: jax.Array, behavior_logprobs: jax.Array, truncation: float
) -> jax.Array:
    """min(r, truncation) per token.

    Truncated importance sampling (Ionides, 2008), as used between sampler and learner.
    """
    ratio = jnp.exp(proximal_logprobs - behavior_logprobs)
    return jax.lax.stop_gradient(jnp.minimum(ratio, truncation))


def truncated_sequence_weights(
    proximal_logprobs: jax.Array,
    behavior_logprobs: jax.Array,
    mask: jax.Array,
    segment_ids: jax.Array,
    truncation: float,
) -> jax.Array:
    """min(product of r over the trajectory's policy tokens, truncation), the same for all its tokens.

    Args:
        proximal_logprobs, behavior_logprobs: `[N, W]`.
        mask: bool `[N, W]`, the policy tokens.
        segment_ids: int `[N, W]`.
    """
    log_ratio = segment_sum(proximal_logprobs - behavior_logprobs, mask, segment_ids)
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio), truncation))


def masked_importance_weights(
    proximal_logprobs: jax.Array, behavior_logprobs: jax.Array, low: float, high: float
) -> jax.Array:
    """r where low <= r <= high, else 0, per token (IcePop: "Every Step Evolves", arXiv:2510.18855, section 3)."""
    ratio = jnp.exp(proximal_logprobs - behavior_logprobs)
    return jax.lax.stop_gradient(jnp.where((ratio >= low) & (ratio <= high), ratio, 0))


def geometric_sequence_mask(
    proximal_logprobs: jax.Array,
    behavior_logprobs: jax.Array,
    mask: jax.Array,
    segment_ids: jax.Array,
    low: float,
    high: float,
) -> jax.Array:
    """1 for all tokens of a trajectory whose geometric mean of r lies in low to high, else 0.

    The mean makes the band independent of length, which the product is not. Arguments as
    `truncated_sequence_weights`.
    """
    mean = jnp.exp(segment_mean(proximal_logprobs - behavior_logprobs, mask, segment_ids))
    return jax.lax.stop_gradient(((mean >= low) & (mean <= high)).astype(mean.dtype))

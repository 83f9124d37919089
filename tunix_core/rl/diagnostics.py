"""How far the sampled tokens are from the policy being updated: sums that add over parts, then figures.

Micro-batches and devices add (or `psum`) the `Moments` of their own tokens; `finalize` gives the same
figures however the tokens were split.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tunix_core.rl import kl
from tunix_core.rl.aggregation import masked_sum


class Moments(NamedTuple):
    """Float32 scalars, sums over policy tokens. r = proximal / behavior at the sampled token."""

    policy_tokens: jax.Array
    ratio: jax.Array
    """sum r"""
    ratio_squared: jax.Array
    """sum r^2"""
    truncated: jax.Array
    """Tokens with r above the truncation."""
    clipped: jax.Array
    """Tokens whose gradient the clip took away."""
    k3_behavior: jax.Array
    """sum k3 of KL(behavior || proximal), from tokens that the behavior policy sampled."""


class OffPolicyFigures(NamedTuple):
    """Float32 scalars. Of no token at all: as on-policy."""

    effective_sample_fraction: jax.Array
    """(sum r)^2 / (n sum r^2): 1 on-policy, 1/n where a single token has all the weight."""
    chi_squared: jax.Array
    """mean(r^2) - 1, the chi-squared divergence of proximal from behavior."""
    importance_ratio: jax.Array
    """mean r, near 1 unless behavior_logprobs are not what the sampler used."""
    truncation_fraction: jax.Array
    clip_fraction: jax.Array
    kl_behavior: jax.Array


def moments(
    proximal_logprobs: jax.Array,
    behavior_logprobs: jax.Array,
    clipped: jax.Array,
    mask: jax.Array,
    *,
    truncation: float,
) -> Moments:
    """Of one part of the batch; arrays of any equal shape. No gradient flows through it."""
    proximal, behavior = jax.lax.stop_gradient((proximal_logprobs, behavior_logprobs))
    ratio = jnp.exp(proximal - behavior)
    return Moments(
        policy_tokens=mask.sum(dtype=jnp.float32),
        ratio=masked_sum(ratio, mask),
        ratio_squared=masked_sum(jnp.square(ratio), mask),
        truncated=masked_sum((ratio > truncation).astype(jnp.float32), mask),
        clipped=masked_sum(clipped.astype(jnp.float32), mask),
        k3_behavior=masked_sum(kl.k3(behavior, proximal), mask),
    )


def finalize(total: Moments) -> OffPolicyFigures:
    """Figures of the whole batch (Owen, "Monte Carlo theory, methods and examples", section 9.3)."""
    empty = total.policy_tokens == 0
    divisor = jnp.maximum(total.policy_tokens, 1)
    squares = total.ratio_squared / divisor
    mean = total.ratio / divisor
    return OffPolicyFigures(
        # All weights may have underflowed to 0: then no token counts.
        effective_sample_fraction=jnp.where(empty, 1.0, jnp.square(mean) / jnp.where(squares > 0, squares, 1.0)),
        chi_squared=jnp.where(empty, 0.0, squares - 1),
        importance_ratio=jnp.where(empty, 1.0, mean),
        truncation_fraction=total.truncated / divisor,
        clip_fraction=total.clipped / divisor,
        kl_behavior=total.k3_behavior / divisor,
    )

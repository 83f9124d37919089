"""Per-token estimators of KL(policy || reference) from log probabilities of sampled tokens.

With r = reference / policy at the sampled token (Schulman, "Approximating KL divergence", 2020):
k1 = -log r, k2 = (log r)^2 / 2, k3 = (r - 1) - log r. In expectation over the policy k1 and k3 are the
KL divergence; k3 is never negative.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def k3(logprobs: jax.Array, reference_logprobs: jax.Array) -> jax.Array:
    """(r - 1) - log r, of any equal shape, in nats."""
    log_r = reference_logprobs - logprobs
    return jnp.expm1(log_r) - log_r


def unbiased_k3(logprobs: jax.Array, proximal_logprobs: jax.Array, reference_logprobs: jax.Array) -> jax.Array:
    """k3 times the ratio policy / proximal, through which gradients flow.

    Differentiating k3 alone ignores that the sampling distribution moves with the policy; the ratio
    puts that term back (DeepSeek-V3.2, arXiv:2512.02556, section 3.1).

    Args:
        proximal_logprobs: of the policy the tokens are taken to come from; constants.
    """
    ratio = jnp.exp(logprobs - jax.lax.stop_gradient(proximal_logprobs))
    return ratio * k3(logprobs, reference_logprobs)

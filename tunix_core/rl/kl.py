"""Per-token estimators of KL(policy || reference) from log probabilities of sampled tokens.

With r = reference / policy at the sampled token (Schulman, "Approximating KL divergence", 2020):
k1 = -log r, k2 = (log r)^2 / 2, k3 = (r - 1) - log r. In expectation over the policy k1 and k3 are the
KL divergence; k2 is biased, and has the KL's gradient where policy and reference meet. k2 and k3 are
never negative. All take and give arrays of any equal shape, in nats.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def k1(logprobs: jax.Array, reference_logprobs: jax.Array) -> jax.Array:
    """-log r: unbiased, of either sign, of high variance."""
    return logprobs - reference_logprobs


def k2(logprobs: jax.Array, reference_logprobs: jax.Array) -> jax.Array:
    """(log r)^2 / 2."""
    return 0.5 * jnp.square(reference_logprobs - logprobs)


def k3(logprobs: jax.Array, reference_logprobs: jax.Array) -> jax.Array:
    """(r - 1) - log r: k1 with a control variate of mean zero."""
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

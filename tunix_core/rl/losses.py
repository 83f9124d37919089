"""Per-token policy losses, to be minimised."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def decoupled_ppo(
    logprobs: jax.Array,
    proximal_logprobs: jax.Array,
    advantages: jax.Array,
    correction: jax.Array,
    clip_low: float,
    clip_high: float,
) -> tuple[jax.Array, jax.Array]:
    """PPO's clipped objective around a proximal policy, weighted for the behavior policy.

    With u = policy / proximal: -w min(u A, clip(u, 1 - clip_low, 1 + clip_high) A). Hilton et al.
    (arXiv:2110.00641) separate the proximal policy, which the clip holds on to, from the behavior policy,
    which w corrects for; the asymmetric clip is DAPO's (arXiv:2503.14476).

    Args:
        correction: w, constants.

    Returns:
        The loss per token, and where the clip took the gradient away (bool).
    """
    ratio = jnp.exp(logprobs - jax.lax.stop_gradient(proximal_logprobs))
    clipped_ratio = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    unclipped = ratio * advantages
    objective = jnp.minimum(unclipped, clipped_ratio * advantages)
    return -correction * objective, objective < unclipped

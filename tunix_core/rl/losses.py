"""Per-token policy losses, to be minimised.

u = policy / old at the sampled token; A the token's advantage; w its correction (see `corrections`), a
constant. Gradients flow through `logprobs` alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tunix_core.rl.segments import segment_mean


def _clipped_objective(
    ratio: jax.Array, advantages: jax.Array, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """min(u A, clip(u) A), bounded below by `dual_clip` A where A < 0; and where that took the gradient away."""
    unclipped = ratio * advantages
    objective = jnp.minimum(unclipped, jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        objective = jnp.where(advantages < 0, jnp.maximum(objective, dual_clip * advantages), objective)
    return objective, objective != unclipped


def decoupled_ppo(
    logprobs: jax.Array,
    proximal_logprobs: jax.Array,
    advantages: jax.Array,
    correction: jax.Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """PPO's clipped objective around a proximal policy, weighted for the behavior policy.

    With u = policy / proximal: -w min(u A, clip(u, 1 - clip_low, 1 + clip_high) A). Hilton et al.
    (arXiv:2110.00641) separate the proximal policy, which the clip holds on to, from the behavior policy,
    which w corrects for; the asymmetric clip is DAPO's (arXiv:2503.14476). With the behavior policy as
    proximal and w = 1 it is PPO (arXiv:1707.06347).

    Args:
        correction: w, constants.
        dual_clip: c > 1, or None for no bound. For A < 0 the objective is at least c A, so that a token
            that has become far likelier than it was cannot pull without limit (arXiv:1912.09729, eq. 5).

    Returns:
        The loss per token, and where the clip took the gradient away (bool).
    """
    ratio = jnp.exp(logprobs - jax.lax.stop_gradient(proximal_logprobs))
    objective, clipped = _clipped_objective(ratio, advantages, clip_low, clip_high, dual_clip)
    return -correction * objective, clipped


def gspo(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    segment_ids: jax.Array,
    clip_low: float,
    clip_high: float,
) -> tuple[jax.Array, jax.Array]:
    """Group sequence policy optimisation: one ratio per trajectory, the geometric mean of its tokens'.

    The token form (GSPO-token, arXiv:2507.18071, eq. 13): s_t = sg(s) policy / sg(policy) has the value
    s for every token, and where advantages are equal over a trajectory and tokens are averaged over it,
    GSPO's gradient.

    Args:
        logprobs, old_logprobs, advantages: `[N, W]`.
        mask: bool `[N, W]`, the policy tokens.
        segment_ids: int `[N, W]`.

    Returns:
        As `decoupled_ppo`.
    """
    constant = jax.lax.stop_gradient(logprobs)
    mean = segment_mean(constant - jax.lax.stop_gradient(old_logprobs), mask, segment_ids)
    ratio = jnp.exp(mean + logprobs - constant)
    objective, clipped = _clipped_objective(ratio, advantages, clip_low, clip_high)
    return -objective, clipped


def cispo(
    logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, clip_low: float, clip_high: float
) -> tuple[jax.Array, jax.Array]:
    """-sg(clip(u, 1 - clip_low, 1 + clip_high)) A log policy: the weight is clipped, no gradient is lost.

    MiniMax-M1 (arXiv:2506.13585, eq. 4 and 5).

    Returns:
        The loss per token, and where the weight was clipped (bool).
    """
    ratio = jnp.exp(jax.lax.stop_gradient(logprobs - old_logprobs))
    weight = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs, weight != ratio


def clipped_value_loss(values: jax.Array, old_values: jax.Array, targets: jax.Array, clip: float | None) -> jax.Array:
    """max((V - G)^2, (V_old + clip(V - V_old, -clip, clip) - G)^2) / 2 per token, gradients through `values` alone.

    The bound of the public PPO implementations (arXiv:2005.12729, section 3): a value that has moved by more than
    `clip` towards its target is left alone.

    Args:
        clip: None for no bound.
    """
    old_values, targets = jax.lax.stop_gradient((old_values, targets))
    loss = jnp.square(values - targets)
    if clip is not None:
        near = old_values + jnp.clip(values - old_values, -clip, clip)
        loss = jnp.maximum(loss, jnp.square(near - targets))
    return 0.5 * loss


def importance_weighted(logprobs: jax.Array, advantages: jax.Array, correction: jax.Array) -> jax.Array:
    """-w A log policy: the plain off-policy policy gradient."""
    return -correction * advantages * logprobs

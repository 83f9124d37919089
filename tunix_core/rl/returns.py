"""Returns and advantages from a value function, along the policy tokens of packed trajectories.

The decision process is over policy tokens: the state between two of them may hold any number of tool
tokens, which carry no value and no discount. So each recursion runs backwards over a window and only
moves at a policy token; at a trajectory's last one it starts from nothing, as the episode is over.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Estimates(NamedTuple):
    """`[N, W]` each, constants; 0 where `mask` is false."""

    advantages: jax.Array
    targets: jax.Array
    """What the value function is fitted to."""


class _Next(NamedTuple):
    """State of the recursion: of the policy token after this one, `[N]` each."""

    segment: jax.Array
    value: jax.Array
    carried: jax.Array


def generalized_advantages(
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    segment_ids: jax.Array,
    *,
    discount: float,
    trace_decay: float,
) -> Estimates:
    """GAE (Schulman et al., arXiv:1506.02438, eq. 16): A_t = d_t + (g l) A_{t+1}, d_t = r_t + g V_{t+1} - V_t.

    Args:
        rewards, values: `[N, W]`, at policy tokens; elsewhere anything.
        mask: bool `[N, W]`, the policy tokens.
        segment_ids: int `[N, W]`.
        discount: g, per policy token.
        trace_decay: l, lambda.

    Returns:
        Advantages, and targets A + V (the lambda return).
    """
    rewards, values = jnp.where(mask, rewards, 0), jnp.where(mask, values, 0)

    def step(later: _Next, now: tuple[jax.Array, ...]) -> tuple[_Next, jax.Array]:
        reward, value, is_policy, segment = now
        same = later.segment == segment
        error = reward + discount * jnp.where(same, later.value, 0) - value
        advantage = error + discount * trace_decay * jnp.where(same, later.carried, 0)
        return _advance(later, is_policy, segment, value, advantage), jnp.where(is_policy, advantage, 0)

    advantages = _backwards(step, rewards, values, mask, segment_ids)
    return Estimates(*jax.lax.stop_gradient((advantages, jnp.where(mask, advantages + values, 0))))


def vtrace(
    rewards: jax.Array,
    values: jax.Array,
    log_ratio: jax.Array,
    mask: jax.Array,
    segment_ids: jax.Array,
    *,
    discount: float,
    truncation: float = 1.0,
    trace_truncation: float = 1.0,
    trace_decay: float = 1.0,
) -> Estimates:
    """V-trace (IMPALA, arXiv:1802.01561, eq. 1 and section 4.2), of tokens that another policy sampled.

    With rho = min(truncation, r) and c = l min(trace_truncation, r), r = policy / behavior:
    v_t = V_t + rho_t (r_t + g V_{t+1} - V_t) + g c_t (v_{t+1} - V_{t+1}), and the advantage is
    rho_t (r_t + g v_{t+1} - V_t), the weight included.

    Args:
        log_ratio: `[N, W]`, log r; elsewhere anything.
        trace_decay: l, lambda (remark 2 of the paper).
        Others as `generalized_advantages`.

    Returns:
        Weighted advantages and targets v.
    """
    rewards, values, log_ratio = (jnp.where(mask, x, 0) for x in (rewards, values, log_ratio))
    ratio = jnp.exp(log_ratio)
    weight, trace = jnp.minimum(ratio, truncation), trace_decay * jnp.minimum(ratio, trace_truncation)

    def step(later: _Next, now: tuple[jax.Array, ...]) -> tuple[_Next, tuple[jax.Array, jax.Array]]:
        reward, value, rho, c, is_policy, segment = now
        same = later.segment == segment
        next_value, next_correction = jnp.where(same, later.value, 0), jnp.where(same, later.carried, 0)
        correction = rho * (reward + discount * next_value - value) + discount * c * next_correction
        advantage = rho * (reward + discount * (next_value + next_correction) - value)
        target = value + correction
        out = (jnp.where(is_policy, advantage, 0), jnp.where(is_policy, target, 0))
        return _advance(later, is_policy, segment, value, correction), out

    return Estimates(*jax.lax.stop_gradient(_backwards(step, rewards, values, weight, trace, mask, segment_ids)))


def _advance(later: _Next, is_policy: jax.Array, segment: jax.Array, value: jax.Array, carried: jax.Array) -> _Next:
    """This token becomes the later one, if the policy generated it."""
    new = _Next(segment, value, carried)
    return jax.tree.map(lambda fresh, old: jnp.where(is_policy, fresh, old), new, later)


def _backwards(step, *arrays: jax.Array):  # type: ignore[no-untyped-def]  # of whatever `step` gives
    values, segment_ids = arrays[1], arrays[-1]
    # Like what goes into the carry, in type too: under `shard_map` it varies over devices as that does.
    zeros = jnp.zeros_like(values[:, 0])
    start = _Next(jnp.full_like(segment_ids[:, 0], -1), zeros, zeros)
    _, out = jax.lax.scan(step, start, tuple(a.T for a in arrays), reverse=True)
    return jax.tree.map(lambda a: a.T, out)

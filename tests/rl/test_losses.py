"""The decoupled PPO objective."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from tests.rl.support import check_elementwise, logprobs, variants
from tunix_core.rl.losses import decoupled_ppo


def loss_and_clipped(logp, proximal, advantages, correction):
    return decoupled_ppo(logp, proximal, advantages, correction, 0.2, 0.28)


# (ratio to proximal, advantage, correction, loss, clipped, gradient to logprobs)
GOLDEN = [
    (1.0, 2.0, 1.0, -2.0, False, -2.0),
    (1.0, 2.0, 0.5, -1.0, False, -1.0),
    (1.25, 1.0, 1.0, -1.25, False, -1.25),
    (1.5, 1.0, 1.0, -1.28, True, 0.0),  # gained enough
    (1.5, -1.0, 1.0, 1.5, False, 1.5),  # must come back: not clipped
    (0.5, -1.0, 2.0, 1.6, True, 0.0),  # lost enough
    (0.5, 1.0, 1.0, -0.5, False, -0.5),
    (3.0, 0.0, 1.0, 0.0, False, 0.0),
]


def test_golden_values() -> None:
    ratio, advantages, correction, loss, clipped, gradient = (
        np.array(c, np.float32) for c in zip(*GOLDEN, strict=True)
    )
    proximal = np.full(len(GOLDEN), -3.0, np.float32)
    logp = proximal + np.log(ratio)
    for variant in variants(loss_and_clipped):
        result, flags = variant(logp, proximal, advantages, correction)
        np.testing.assert_allclose(result, loss, rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(flags, clipped.astype(bool))
    result = jax.grad(lambda x: loss_and_clipped(x, proximal, advantages, correction)[0].sum())(logp)
    np.testing.assert_allclose(result, gradient, rtol=1e-5, atol=1e-7)


def oracle(logp: float, proximal: float, advantage: float, correction: float) -> float:
    ratio = math.exp(logp - proximal)
    if ratio < 0.8:
        bounded = 0.8
    elif ratio > 1.28:
        bounded = 1.28
    else:
        bounded = ratio
    return -correction * min(ratio * advantage, bounded * advantage)


def test_against_the_loop() -> None:
    advantages = np.random.default_rng(3).normal(size=(4, 9)).astype(np.float32).astype(np.float64)
    check_elementwise(
        lambda *arrays: loss_and_clipped(*arrays)[0],
        oracle,
        [logprobs(0, 4, 9), logprobs(1, 4, 9), advantages, np.exp(logprobs(2, 4, 9)).astype(np.float32)],
    )


def test_at_the_proximal_policy_it_is_the_weighted_policy_gradient() -> None:
    """One update per batch: clipping never acts, the gradient is -w A, whatever the clip."""
    logp = logprobs(0, 30).astype(np.float32)
    advantages = np.random.default_rng(1).normal(size=30).astype(np.float32)
    correction = np.random.default_rng(2).uniform(0, 2, 30).astype(np.float32)

    def loss(x):
        values, clipped = decoupled_ppo(x, jax.lax.stop_gradient(x), advantages, correction, 0.01, 0.01)
        return values.sum(), clipped

    gradient, clipped = jax.grad(loss, has_aux=True)(jnp.asarray(logp))
    np.testing.assert_allclose(gradient, -correction * advantages, rtol=1e-6)
    assert not clipped.any()


def test_no_gradient_to_the_proximal_policy() -> None:
    arrays = [np.float32([-1.0]), np.float32([-1.1]), np.float32([1.0]), np.float32([1.0])]
    gradient = jax.grad(lambda *a: loss_and_clipped(*a)[0].sum(), argnums=1)(*arrays)
    assert gradient.tolist() == [0.0]

"""k1, k2, k3 and the unbiased form of k3."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rl.support import check_elementwise, logprobs, variants
from tunix_core.rl import kl

LN2 = math.log(2.0)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [(kl.k1, [0.0, LN2, -LN2]), (kl.k2, [0.0, LN2**2 / 2, LN2**2 / 2]), (kl.k3, [0.0, LN2 - 0.5, 1 - LN2])],
)
def test_golden_values(estimator, expected) -> None:
    """Policy 1/4 against references 1/4, 1/8, 1/2."""
    policy = np.log(np.float32([0.25] * 3))
    reference = np.log(np.float32([0.25, 0.125, 0.5]))
    for variant in variants(estimator):
        np.testing.assert_allclose(variant(policy, reference), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("estimator", "oracle"),
    [
        (kl.k1, lambda p, q: -(q - p)),
        (kl.k2, lambda p, q: (q - p) ** 2 / 2),
        (kl.k3, lambda p, q: math.exp(q - p) - 1 - (q - p)),
    ],
)
def test_against_the_loop(estimator, oracle) -> None:
    check_elementwise(estimator, oracle, [logprobs(0, 4, 9), logprobs(1, 4, 9)])


def test_unbiased_k3_against_the_loop() -> None:
    check_elementwise(
        kl.unbiased_k3,
        lambda p, x, q: math.exp(p - x) * (math.exp(q - p) - 1 - (q - p)),
        [logprobs(0, 4, 9), logprobs(1, 4, 9), logprobs(2, 4, 9)],
    )


def test_k3_is_precise_near_zero() -> None:
    """exp(x) - 1 - x in float32 would be all rounding here."""
    np.testing.assert_allclose(kl.k3(jnp.float32(-1.0), jnp.float32(-1.0 + 2**-10)), 2.0**-21, rtol=2e-2)


def divergence(policy_logits: jax.Array, reference_logits: jax.Array) -> jax.Array:
    p, q = jax.nn.log_softmax(policy_logits), jax.nn.log_softmax(reference_logits)
    return jnp.sum(jnp.exp(p) * (p - q))


LOGITS = np.random.default_rng(5).normal(size=(2, 7)).astype(np.float32)


@pytest.mark.parametrize("estimator", [kl.k1, kl.k3])
def test_expectation_is_the_divergence(estimator) -> None:
    p, q = jax.nn.log_softmax(LOGITS[0]), jax.nn.log_softmax(LOGITS[1])
    np.testing.assert_allclose(jnp.sum(jnp.exp(p) * estimator(p, q)), divergence(*LOGITS), rtol=1e-5)


def test_gradient_of_unbiased_k3_is_that_of_the_divergence() -> None:
    """On tokens sampled from the proximal policy; k3 alone gives another gradient."""
    proximal = jax.nn.log_softmax(LOGITS[0])
    reference = jax.nn.log_softmax(LOGITS[1])

    def expected(estimate):
        return lambda logits: jnp.sum(jnp.exp(proximal) * estimate(jax.nn.log_softmax(logits)))

    exact = jax.grad(divergence)(LOGITS[0], LOGITS[1])
    unbiased = jax.grad(expected(lambda p: kl.unbiased_k3(p, proximal, reference)))(LOGITS[0])
    plain = jax.grad(expected(lambda p: kl.k3(p, reference)))(LOGITS[0])
    np.testing.assert_allclose(unbiased, exact, rtol=1e-4, atol=1e-6)
    assert np.abs(np.asarray(plain - exact)).max() > 0.05


def test_no_gradient_to_the_proximal_policy() -> None:
    gradient = jax.grad(kl.unbiased_k3, argnums=1)(jnp.float32(-1.0), jnp.float32(-2.0), jnp.float32(-0.5))
    assert gradient == 0

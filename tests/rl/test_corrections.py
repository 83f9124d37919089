"""Truncated importance weights."""

import math

import jax
import numpy as np

from tests.rl.support import check_elementwise, logprobs, variants
from tunix_core.rl.corrections import truncated_importance_weights


def weights(proximal, behavior):
    return truncated_importance_weights(proximal, behavior, 2.0)


def test_golden_values() -> None:
    proximal = np.log(np.float32([0.5, 0.5, 0.5, 0.5]))
    behavior = np.log(np.float32([0.5, 0.25, 0.125, 1.0]))
    for variant in variants(weights):
        np.testing.assert_allclose(variant(proximal, behavior), [1.0, 2.0, 2.0, 0.5], rtol=1e-6)


def test_against_the_loop() -> None:
    check_elementwise(weights, lambda p, b: min(math.exp(p - b), 2.0), [logprobs(0, 4, 9), logprobs(1, 4, 9)])


def test_on_policy_is_one_and_wide_truncation_is_the_plain_ratio() -> None:
    p, b = logprobs(0, 20).astype(np.float32), logprobs(1, 20).astype(np.float32)
    np.testing.assert_array_equal(weights(p, p), 1.0)
    np.testing.assert_allclose(truncated_importance_weights(p, b, 1e9), np.exp(p - b), rtol=1e-6)


def test_a_ratio_that_overflows_is_truncated() -> None:
    np.testing.assert_array_equal(weights(np.float32([0.0]), np.float32([-1000.0])), 2.0)


def test_no_gradient_flows() -> None:
    gradients = jax.grad(lambda p, b: weights(p, b).sum(), argnums=(0, 1))(np.float32([-1.0]), np.float32([-1.2]))
    assert [g.tolist() for g in gradients] == [[0.0], [0.0]]

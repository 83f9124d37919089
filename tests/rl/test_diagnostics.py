"""Off-policy figures from sums that add."""

import math

import jax
import numpy as np
import pytest

from tests.rl.support import logprobs
from tunix_core.rl.diagnostics import finalize, moments


def figures(proximal, behavior, clipped, mask):
    return finalize(moments(proximal, behavior, clipped, mask, truncation=2.0))


def test_golden_values() -> None:
    """Ratios 1, 3 and a masked one: mean 2, mean square 5."""
    behavior = np.log(np.float32([0.25, 0.25, 0.1]))
    proximal = np.log(np.float32([0.25, 0.75, 0.9]))
    result = figures(proximal, behavior, np.array([True, False, True]), np.array([True, True, False]))
    expected = (0.8, 4.0, 2.0, 0.5, 0.5, (2 - math.log(3)) / 2)
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_against_the_loop() -> None:
    proximal, behavior = logprobs(0, 6, 11), logprobs(1, 6, 11)
    rng = np.random.default_rng(2)
    mask, clipped = rng.random((6, 11)) < 0.6, rng.random((6, 11)) < 0.5
    n = first = second = truncated = cut = k3 = 0.0
    for i, j in zip(*np.nonzero(mask), strict=True):
        log_ratio = proximal[i, j] - behavior[i, j]
        ratio = math.exp(log_ratio)
        n, first, second = n + 1, first + ratio, second + ratio * ratio
        truncated, cut, k3 = truncated + (ratio > 2), cut + clipped[i, j], k3 + ratio - 1 - log_ratio
    expected = (first * first / (n * second), second / n - 1, first / n, truncated / n, cut / n, k3 / n)
    arrays = (proximal.astype(np.float32), behavior.astype(np.float32), clipped, mask)
    np.testing.assert_allclose(figures(*arrays), expected, rtol=2e-5)
    np.testing.assert_allclose(jax.jit(figures)(*arrays), expected, rtol=2e-5)
    # Parts are added, then finalised: the same as the whole.
    parts = jax.vmap(lambda *a: moments(*a, truncation=2.0))(*arrays)
    np.testing.assert_allclose(finalize(jax.tree.map(lambda x: x.sum(0), parts)), expected, rtol=2e-5)


@pytest.mark.parametrize("mask", [np.ones(5, bool), np.zeros(5, bool)], ids=["on policy", "no token"])
def test_on_policy_and_nothing(mask: np.ndarray) -> None:
    p = logprobs(0, 5).astype(np.float32)
    np.testing.assert_array_equal(figures(p, p, np.zeros(5, bool), mask), [1, 0, 1, 0, 0, 0])


def test_one_token_with_all_the_weight() -> None:
    result = figures(
        np.float32([0.0, -50.0, -50.0, -50.0]), np.float32([-1.0] * 4), np.zeros(4, bool), np.ones(4, bool)
    )
    np.testing.assert_allclose(result.effective_sample_fraction, 0.25, rtol=1e-5)
    underflow = figures(np.float32([-200.0]), np.float32([0.0]), np.zeros(1, bool), np.ones(1, bool))
    assert underflow.effective_sample_fraction == 0


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
def test_masked_tokens_cannot_matter(junk: float) -> None:
    p, b = logprobs(0, 6).astype(np.float32), logprobs(1, 6).astype(np.float32)
    mask = np.array([True, False] * 3)
    clean = jax.jit(figures)(p, b, np.zeros(6, bool), mask)
    dirty = jax.jit(figures)(np.where(mask, p, junk), np.where(mask, b, junk), ~mask, mask)
    np.testing.assert_array_equal(dirty, clean)

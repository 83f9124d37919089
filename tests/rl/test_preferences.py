"""DPO against a loop in float64, and what it must be at the start."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rl.support import check_elementwise, logprobs, variants
from tunix_core.rl.preferences import dpo, first_of_pair, pair_sums

LN2 = math.log(2.0)
# (chosen log ratio, rejected log ratio, beta, label smoothing, loss, gradient to the chosen one)
GOLDEN = [
    (0.0, 0.0, 0.1, 0.0, LN2, -0.05),
    (3.0, 3.0, 0.5, 0.3, LN2, -0.5 * (0.5 - 0.3)),
    (math.log(3.0), 0.0, 1.0, 0.0, math.log(4 / 3), -0.25),  # sigma(h) = 3/4
    (0.0, math.log(3.0), 1.0, 0.0, math.log(4.0), -0.75),
    (math.log(3.0), 0.0, 1.0, 0.25, 0.75 * math.log(4 / 3) + 0.25 * math.log(4), 0.0),  # as sure as the labels are
    (1000.0, -1000.0, 1.0, 0.0, 0.0, 0.0),
    (-1000.0, 1000.0, 1.0, 0.0, 2000.0, -1.0),  # no overflow
]


@pytest.mark.parametrize(("chosen", "rejected", "beta", "smoothing", "loss", "gradient"), GOLDEN)
def test_golden_values(
    chosen: float, rejected: float, beta: float, smoothing: float, loss: float, gradient: float
) -> None:
    arrays = np.float32([chosen]), np.float32([rejected])
    for variant in variants(lambda c, r: dpo(c, r, beta, smoothing)):
        np.testing.assert_allclose(variant(*arrays), [loss], rtol=1e-6, atol=1e-7)
    up, down = jax.grad(lambda c, r: dpo(c, r, beta, smoothing).sum(), argnums=(0, 1))(*arrays)
    np.testing.assert_allclose(up, [gradient], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(down, -up)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_against_the_loop(smoothing: float) -> None:
    def oracle(chosen: float, rejected: float) -> float:
        probability = 1 / (1 + math.exp(-0.7 * (chosen - rejected)))
        return -(1 - smoothing) * math.log(probability) - smoothing * math.log(1 - probability)

    check_elementwise(lambda c, r: dpo(c, r, 0.7, smoothing), oracle, [logprobs(0, 4, 9), logprobs(1, 4, 9)])


# One window: pairs of 3 + 2 and 1 + 4 tokens, then padding.
SEGMENTS = np.array([[1, 1, 1, 2, 2, 3, 4, 4, 4, 4, 0, 0]], np.int32)
POSITIONS = np.array([[0, 1, 2, 0, 1, 0, 0, 1, 2, 3, 0, 0]], np.int32)
MASK = np.array([[0, 1, 1, 0, 1, 1, 0, 0, 1, 1, 0, 0]], bool)
VALUES = np.where(MASK, np.arange(12.0), np.nan).astype(np.float32)


def test_sums_over_pairs() -> None:
    for function in (pair_sums, jax.jit(pair_sums)):
        sums = function(VALUES, MASK, SEGMENTS)
        np.testing.assert_array_equal(sums.chosen, [[3.0] * 5 + [5.0] * 5 + [0.0] * 2])
        np.testing.assert_array_equal(sums.rejected, [[4.0] * 5 + [17.0] * 5 + [0.0] * 2])


def test_each_pair_is_counted_once() -> None:
    first = np.asarray(first_of_pair(POSITIONS, SEGMENTS))
    assert np.flatnonzero(first[0]).tolist() == [0, 5]


def test_packed_pairs_equal_a_loop_over_them() -> None:
    """Loss and gradient; at the reference log 2, and the gradient raises what was chosen and lowers the other."""
    rng = np.random.default_rng(0)
    reference = np.where(MASK, -rng.exponential(1.0, MASK.shape), 0).astype(np.float32)

    def loss(values: jax.Array) -> jax.Array:
        sums = pair_sums(values - reference, MASK, SEGMENTS)
        return jnp.where(first_of_pair(POSITIONS, SEGMENTS), dpo(*sums, 0.5), 0).sum()

    assert float(loss(jnp.asarray(reference))) == pytest.approx(2 * LN2)
    gradient = np.asarray(jax.grad(loss)(jnp.asarray(reference)))
    np.testing.assert_allclose(gradient, np.where(MASK, np.where(SEGMENTS % 2 == 1, -0.25, 0.25), 0))

    policy = np.where(MASK, -rng.exponential(1.0, MASK.shape), 0).astype(np.float32)
    ratio = (policy - reference).astype(np.float64)[0]
    expected = 0.0
    for chosen, rejected in ((1, 2), (3, 4)):
        margin = sum(
            (1 if segment == chosen else -1) * ratio[t]
            for t, segment in enumerate(SEGMENTS[0])
            if segment in (chosen, rejected) and MASK[0, t]
        )
        expected += math.log1p(math.exp(-0.5 * margin))
    assert float(loss(jnp.asarray(policy))) == pytest.approx(expected, rel=1e-6)

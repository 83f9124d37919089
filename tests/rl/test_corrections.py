"""Weights between sampler and learner."""

import math

import jax
import numpy as np
import pytest

from tests.rl.packed import packed
from tests.rl.support import check_elementwise, logprobs, variants
from tunix_core.rl.corrections import (
    geometric_sequence_mask,
    masked_importance_weights,
    truncated_importance_weights,
    truncated_sequence_weights,
)


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


def test_a_band_keeps_the_ratio_inside_and_drops_it_outside() -> None:
    """IcePop; the bounds belong to the band."""
    ratios = np.float32([0.25, 0.5, 1.0, 2.0, 4.0, np.inf])
    result = masked_importance_weights(np.log(ratios), np.zeros(6, np.float32), 0.5, 2.0)
    np.testing.assert_allclose(result, [0, 0.5, 1, 2, 0, 0], rtol=1e-6)


def test_the_band_against_the_loop() -> None:
    def oracle(p: float, b: float) -> float:
        ratio = math.exp(p - b)
        return ratio if 0.5 <= ratio <= 2.0 else 0.0

    check_elementwise(
        lambda p, b: masked_importance_weights(p, b, 0.5, 2.0), oracle, [logprobs(0, 4, 9), logprobs(1, 4, 9)]
    )


@pytest.mark.parametrize("seed", range(3))
def test_sequence_corrections_against_the_loop(seed: int) -> None:
    """What lies between the policy's tokens may be anything; a trajectory has one weight."""
    where = packed(seed)
    proximal, behavior = (where.draw(k) / 3 for k in (1, 2))
    product = truncated_sequence_weights(proximal, behavior, where.mask, where.segment_ids, 2.0)
    kept = geometric_sequence_mask(proximal, behavior, where.mask, where.segment_ids, 0.9, 1.2)
    seen = set()
    for window, columns in where.segments():
        if len(columns) == 0:
            continue
        ratios = np.exp(proximal[window, columns].astype(np.float64) - behavior[window, columns])
        np.testing.assert_allclose(product[window, columns], min(ratios.prod(), 2.0), rtol=1e-5)
        mean = ratios.prod() ** (1 / len(ratios))
        seen.add(0.9 <= mean <= 1.2)
        np.testing.assert_array_equal(kept[window, columns], float(0.9 <= mean <= 1.2))
    assert seen == {True, False}


@pytest.mark.parametrize("function", [truncated_sequence_weights, geometric_sequence_mask])
def test_on_policy_sequences_have_weight_one(function) -> None:
    where = packed(3)
    bounds = (2.0,) if function is truncated_sequence_weights else (0.9, 1.1)
    result = function(where.draw(1), where.draw(1), where.mask, where.segment_ids, *bounds)
    np.testing.assert_array_equal(np.asarray(result)[where.mask], 1.0)


@pytest.mark.parametrize(
    "weigh",
    [
        lambda p, b, _: masked_importance_weights(p, b, 0.1, 10.0),
        lambda p, b, where: truncated_sequence_weights(p, b, where.mask, where.segment_ids, 1e9),
        lambda p, b, where: geometric_sequence_mask(p, b, where.mask, where.segment_ids, 0.1, 10.0),
    ],
)
def test_no_gradient_flows_through_any(weigh) -> None:
    where = packed(4)
    arrays = [where.draw(k, junk=0) / 3 for k in (1, 2)]
    for gradient in jax.grad(lambda p, b: weigh(p, b, where).sum(), argnums=(0, 1))(*arrays):
        assert not np.asarray(gradient).any()

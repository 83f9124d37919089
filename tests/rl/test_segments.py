"""Sums over the trajectories of packed windows."""

import jax
import numpy as np

from tests.rl.packed import packed
from tunix_core.rl.segments import segment_mean, segment_sum


def test_golden_values() -> None:
    ids = np.int32([[1, 1, 2, 2, 2, 0], [4, 4, 4, 4, 4, 6]])
    mask = np.array([[1, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1]], bool)
    values = np.float32([[1, 2, np.nan, 3, 5, np.inf], [np.nan] * 5 + [7]])
    np.testing.assert_array_equal(segment_sum(values, mask, ids), [[3, 3, 8, 8, 8, 0], [0, 0, 0, 0, 0, 7]])
    np.testing.assert_array_equal(segment_mean(values, mask, ids), [[1.5, 1.5, 4, 4, 4, 0], [0, 0, 0, 0, 0, 7]])


def test_against_the_loop_under_jit() -> None:
    where = packed(0, num_windows=5, window_tokens=40)
    values = where.draw(1)
    total, mean = (jax.jit(f)(values, where.mask, where.segment_ids) for f in (segment_sum, segment_mean))
    for window, columns in where.segments():
        own = values[window, columns].astype(np.float64)
        if len(own):
            np.testing.assert_allclose(total[window, columns], own.sum(), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(mean[window, columns], own.mean(), rtol=1e-5, atol=1e-6)


def test_a_token_gets_its_trajectorys_gradient_and_a_masked_one_none() -> None:
    where = packed(1)
    gradient = jax.grad(lambda v: (segment_sum(v, where.mask, where.segment_ids) * where.mask).sum())(where.draw(2))
    expected = np.zeros(where.mask.shape)
    for window, columns in where.segments():
        expected[window, columns] = len(columns)
    np.testing.assert_array_equal(gradient, expected)

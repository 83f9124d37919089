"""Masked tokens cannot matter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_core.rl.aggregation import masked_sum, where_policy

MASK = np.array([[True, False, True], [False, True, False]])
VALUES = np.array([[1.0, 7.0, 2.5], [7.0, -4.0, 7.0]], np.float32)
ANYTHING = [np.nan, np.inf, -np.inf, 1e38, 0.0]


@pytest.mark.parametrize("junk", ANYTHING)
def test_golden_value_and_gradient(junk: float) -> None:
    values = np.where(MASK, VALUES, np.float32(junk))
    for function in (masked_sum, jax.jit(masked_sum)):
        assert function(values, MASK) == -0.5
        np.testing.assert_array_equal(jax.grad(function)(values, MASK), MASK.astype(np.float32))
    np.testing.assert_array_equal(jax.vmap(masked_sum)(values, MASK), [3.5, -4.0])


def test_against_the_loop_and_the_slice() -> None:
    rng = np.random.default_rng(0)
    values, mask = rng.normal(size=(5, 40)).astype(np.float32), rng.random((5, 40)) < 0.3
    total = 0.0
    for row, keep in zip(values.tolist(), mask.tolist(), strict=True):
        for value, kept in zip(row, keep, strict=True):
            if kept:
                total += value
    np.testing.assert_allclose(masked_sum(values, mask), total, rtol=1e-5)
    np.testing.assert_allclose(masked_sum(values, mask), values[mask].sum(), rtol=1e-5)


def test_parts_over_one_denominator_add_up() -> None:
    rng = np.random.default_rng(1)
    values, mask = rng.normal(size=(8, 16)).astype(np.float32), rng.random((8, 16)) < 0.4
    whole = masked_sum(values, mask) / mask.sum()
    for cuts in ([4], [2, 4, 6], [1, 6]):  # two, four, and ragged micro-batches
        pairs = zip(np.split(values, cuts), np.split(mask, cuts), strict=True)
        parts = sum(masked_sum(v, m) / mask.sum() for v, m in pairs)
        np.testing.assert_allclose(parts, whole, rtol=1e-5)


@pytest.mark.parametrize("junk", ANYTHING)
def test_both_selections_keep_the_chain_rule_clean(junk: float) -> None:
    """Through an exponential, and times a factor that is itself not finite."""
    values, factor = (np.where(MASK, VALUES, np.float32(junk)) for _ in range(2))

    def loss(x: jax.Array) -> jax.Array:
        return masked_sum(jnp.exp(where_policy(MASK, x)) * where_policy(MASK, factor), MASK)

    def outside_only(x: jax.Array) -> jax.Array:
        return masked_sum(jnp.exp(x) * factor, MASK)

    expected = np.where(MASK, np.exp(VALUES) * VALUES, 0)
    np.testing.assert_allclose(jax.grad(loss)(values), expected, rtol=1e-5)
    if not np.isfinite(junk):
        assert not np.isfinite(np.asarray(jax.grad(outside_only)(values))).all()

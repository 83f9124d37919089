"""Checks that a function of arrays gives the same under jit and vmap, and agrees with a loop in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def variants(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Itself, compiled, and mapped over the leading axis and compiled; all for elementwise functions."""
    return [function, jax.jit(function), jax.jit(jax.vmap(function))]


def check_elementwise(
    function: Callable[..., Any], oracle: Callable[..., float], arrays: list[np.ndarray], rtol: float = 1e-5
) -> None:
    """`oracle` takes and gives Python floats, one element at a time."""
    flat = [np.asarray(a, np.float64).ravel() for a in arrays]
    expected = np.array([oracle(*values) for values in zip(*(a.tolist() for a in flat), strict=True)])
    expected = expected.reshape(arrays[0].shape)
    for variant in variants(function):
        result = np.asarray(variant(*(a.astype(np.float32) for a in arrays)))
        np.testing.assert_allclose(result, expected, rtol=rtol, atol=2e-6)


def logprobs(seed: int, *shape: int) -> np.ndarray:
    """Plausible log probabilities, float64 that float32 holds exactly."""
    drawn = -np.random.default_rng(seed).exponential(1.0, shape)
    return drawn.astype(np.float32).astype(np.float64)

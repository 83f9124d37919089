"""Generalised advantages and V-trace along the policy tokens of packed trajectories."""

import jax
import numpy as np
import pytest

from tests.rl.packed import Packed, packed
from tunix_core.rl.returns import generalized_advantages, vtrace


def gae_loop(rewards: list[float], values: list[float], discount: float, decay: float) -> list[float]:
    """The sum of discounted temporal differences, written out for each token."""
    values = [*values, 0.0]
    errors = [rewards[t] + discount * values[t + 1] - values[t] for t in range(len(rewards))]
    return [sum((discount * decay) ** (k - t) * errors[k] for k in range(t, len(errors))) for t in range(len(errors))]


def vtrace_loop(rewards, values, ratios, discount, truncation, trace, decay=1.0) -> tuple[list[float], list[float]]:
    """Equation 1 of the paper as a sum of products, for each token."""
    values = [*values, 0.0]
    rho = [min(truncation, r) for r in ratios]
    c = [decay * min(trace, r) for r in ratios]
    errors = [rho[t] * (rewards[t] + discount * values[t + 1] - values[t]) for t in range(len(rewards))]
    targets = []
    for t in range(len(rewards)):
        total = values[t]
        for k in range(t, len(rewards)):
            total += discount ** (k - t) * float(np.prod(c[t:k])) * errors[k]
        targets.append(total)
    after = [*targets[1:], 0.0]
    advantages = [rho[t] * (rewards[t] + discount * after[t] - values[t]) for t in range(len(rewards))]
    return advantages, targets


def oracle(where: Packed, function, *arrays: np.ndarray) -> list[np.ndarray]:
    outs = [np.zeros(where.mask.shape) for _ in range(2)]
    for window, columns in where.segments():
        rows = [a[window, columns].astype(np.float64).tolist() for a in arrays]
        for out, result in zip(outs, function(*rows), strict=True):
            out[window, columns] = result
    return outs


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("discount", "decay"), [(1.0, 1.0), (0.9, 0.95), (0.99, 0.0)])
def test_gae_is_the_loop_and_ignores_what_is_between(seed: int, discount: float, decay: float) -> None:
    where = packed(seed)
    rewards, values = where.draw(1), where.draw(2)  # NaN wherever the policy did not speak

    def loop(r, v):
        advantages = gae_loop(r, v, discount, decay)
        return advantages, [a + b for a, b in zip(advantages, v, strict=True)]

    function = jax.jit(
        lambda r, v: generalized_advantages(r, v, where.mask, where.segment_ids, discount=discount, trace_decay=decay)
    )
    for result, expected in zip(function(rewards, values), oracle(where, loop, rewards, values), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_gae_golden() -> None:
    """Two trajectories in one window: 2, 1 with a tool token between, and 3."""
    ids, mask = np.int32([[1, 1, 1, 2]]), np.array([[True, False, True, True]])
    result = generalized_advantages(
        np.float32([[0, 9, 1, 3]]), np.float32([[0.5, 9, 0.25, 1]]), mask, ids, discount=0.5, trace_decay=0.5
    )
    # Second token: 1 - 0.25; first: 0 + 0.5 * 0.25 - 0.5 + 0.25 * 0.75.
    np.testing.assert_allclose(result.advantages, [[-0.1875, 0, 0.75, 2]])
    np.testing.assert_allclose(result.targets, [[0.3125, 0, 1, 3]])


def test_with_full_traces_and_no_values_it_is_the_return_to_go() -> None:
    where = packed(4)
    rewards = where.draw(1, junk=0)
    result = generalized_advantages(rewards, 0 * rewards, where.mask, where.segment_ids, discount=1.0, trace_decay=1.0)
    for window, columns in where.segments():
        to_go = np.cumsum(rewards[window, columns][::-1])[::-1]
        np.testing.assert_allclose(result.advantages[window, columns], to_go, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("truncation", "trace", "decay"), [(1.0, 1.0, 1.0), (2.0, 1.0, 0.8), (1e9, 1e9, 1.0)])
def test_vtrace_is_the_loop(seed: int, truncation: float, trace: float, decay: float) -> None:
    where = packed(seed)
    rewards, values, log_ratio = where.draw(1), where.draw(2), where.draw(3)

    def loop(r, v, x):
        return vtrace_loop(r, v, np.exp(x).tolist(), 0.9, truncation, trace, decay)

    result = vtrace(
        rewards,
        values,
        log_ratio,
        where.mask,
        where.segment_ids,
        discount=0.9,
        truncation=truncation,
        trace_truncation=trace,
        trace_decay=decay,
    )
    for found, expected in zip(result, oracle(where, loop, rewards, values, log_ratio), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_vtrace_on_policy_is_the_full_trace() -> None:
    """With r = 1 its targets are those of GAE at lambda 1 (section 4.1 of the paper)."""
    where = packed(5)
    rewards, values = where.draw(1, junk=0), where.draw(2, junk=0)
    rest = (where.mask, where.segment_ids)
    full = generalized_advantages(rewards, values, *rest, discount=0.9, trace_decay=1.0)
    corrected = vtrace(rewards, values, 0 * rewards, *rest, discount=0.9)
    np.testing.assert_allclose(corrected.targets, full.targets, rtol=1e-5, atol=1e-5)


def test_no_gradient_flows() -> None:
    where = packed(6)
    rewards, values = where.draw(1, junk=0), where.draw(2, junk=0)
    rest = (where.mask, where.segment_ids)

    def total(v):
        gae = generalized_advantages(rewards, v, *rest, discount=0.9, trace_decay=0.9)
        return sum(part.sum() for part in (*gae, *vtrace(rewards, v, v, *rest, discount=0.9)))

    assert not np.asarray(jax.grad(total)(values)).any()

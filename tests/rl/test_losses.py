"""Policy losses against loops in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from tests.rl.packed import packed
from tests.rl.support import check_elementwise, logprobs, variants
from tunix_core.rl.losses import cispo, clipped_value_loss, decoupled_ppo, gspo, importance_weighted


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


# (ratio, advantage, loss, clipped) with c = 3
DUAL_CLIP = [
    (5.0, -1.0, 3.0, True),  # bounded from below
    (2.0, -1.0, 2.0, False),
    (5.0, 1.0, -1.28, True),  # the upper clip holds before
    (0.1, -1.0, 0.8, True),
]


def test_dual_clip_golden_values() -> None:
    ratio, advantages, loss, clipped = (np.array(c, np.float32) for c in zip(*DUAL_CLIP, strict=True))
    ones = np.ones_like(ratio)

    def dual(logp):
        return decoupled_ppo(logp, 0 * ones, advantages, ones, 0.2, 0.28, dual_clip=3.0)

    result, flags = dual(np.log(ratio))
    np.testing.assert_allclose(result, loss, rtol=1e-5)
    np.testing.assert_array_equal(flags, clipped.astype(bool))
    gradient = np.asarray(jax.grad(lambda x: dual(x)[0].sum())(np.log(ratio)))
    np.testing.assert_array_equal(gradient != 0, ~clipped.astype(bool))


def test_cispo_against_the_loop() -> None:
    def oracle(logp: float, old: float, advantage: float) -> float:
        return -min(max(math.exp(logp - old), 0.8), 1.28) * advantage * logp

    advantages = np.random.default_rng(3).normal(size=(4, 9)).astype(np.float32).astype(np.float64)
    arrays = [logprobs(0, 4, 9), logprobs(1, 4, 9), advantages]
    check_elementwise(lambda *a: cispo(*a, 0.2, 0.28)[0], oracle, arrays)


def test_cispo_keeps_every_tokens_gradient() -> None:
    """Where PPO would drop it, the weight is at its bound: the gradient is -clip(u) A."""
    ratio, advantages = np.float32([0.1, 1.0, 5.0]), np.float32([-1.0, 2.0, 1.0])
    (_, clipped), gradient = (
        cispo(np.log(ratio), 0 * ratio, advantages, 0.2, 0.28),
        jax.grad(lambda x: cispo(x, 0 * ratio, advantages, 0.2, 0.28)[0].sum())(np.log(ratio)),
    )
    np.testing.assert_allclose(gradient, [0.8, -2.0, -1.28], rtol=1e-6)
    assert clipped.tolist() == [True, False, True]


def test_importance_weighted_is_the_weighted_policy_gradient() -> None:
    advantages, weights = np.float32([1.0, -2.0]), np.float32([0.5, 2.0])
    gradient = jax.grad(lambda x: importance_weighted(x, advantages, weights).sum())(np.float32([-1.0, -3.0]))
    np.testing.assert_array_equal(gradient, [-0.5, 4.0])
    check_elementwise(importance_weighted, lambda p, a, w: -w * a * p, [logprobs(k, 4, 9) for k in range(3)])


def gspo_loop(where, logp, old, advantages, low=0.2, high=0.28) -> np.ndarray:
    """Equation 5 of the paper with each sequence's loss given to all its tokens."""
    out = np.zeros(where.mask.shape)
    for window, columns in where.segments():
        if len(columns):
            ratio = np.exp((logp[window, columns] - old[window, columns]).mean())
            a = advantages[window, columns]
            out[window, columns] = -np.minimum(ratio * a, np.clip(ratio, 1 - low, 1 + high) * a)
    return out


def test_gspo_value_and_gradient_against_the_loop() -> None:
    """The gradient by central differences of the sequence form, each sequence's mean over its tokens."""
    where = packed(0)
    logp, old = (where.draw(k, junk=0).astype(np.float64) for k in (1, 2))
    level = {key: k % 3 - 1.0 for k, key in enumerate((w, int(c[0])) for w, c in where.segments() if len(c))}
    advantages, weight = np.zeros(where.mask.shape), np.zeros(where.mask.shape)
    for window, columns in where.segments():
        if len(columns):
            advantages[window, columns] = level[window, int(columns[0])]
            weight[window, columns] = 1 / len(columns)

    def loss(x):
        args = (old.astype(np.float32), advantages.astype(np.float32), where.mask, where.segment_ids, 0.2, 0.28)
        values, clipped = gspo(x, *args)
        return jnp.where(where.mask, values * weight, 0).sum(), (values, clipped)

    gradient, (values, clipped) = jax.jit(jax.grad(loss, has_aux=True))(logp.astype(np.float32))
    expected = gspo_loop(where, logp, old, advantages)
    np.testing.assert_allclose(np.asarray(values)[where.mask], expected[where.mask], rtol=1e-5, atol=1e-6)
    assert clipped[where.mask].any()
    assert not clipped[where.mask].all()

    step = 1e-6
    for window, column in zip(*np.nonzero(where.mask), strict=True):
        ends = []
        for sign in (1, -1):
            moved = logp.copy()
            moved[window, column] += sign * step
            ends.append((gspo_loop(where, moved, old, advantages) * weight).sum())
        np.testing.assert_allclose(gradient[window, column], (ends[0] - ends[1]) / (2 * step), rtol=1e-3, atol=1e-5)
    assert not np.asarray(gradient)[~where.mask].any()


def test_on_policy_all_losses_have_the_policy_gradient() -> None:
    """At u = 1 and w = 1 each gradient is -A."""
    where = packed(2)
    logp, advantages = where.draw(1, junk=0), where.draw(2, junk=0)
    ones = np.ones_like(logp)
    # GSPO's sequences need one advantage each.
    constant = ones
    cases = {
        "ppo": (lambda x: decoupled_ppo(x, logp, advantages, ones, 0.2, 0.28, 3.0)[0], advantages),
        "cispo": (lambda x: cispo(x, logp, advantages, 0.2, 0.28)[0], advantages),
        "weighted": (lambda x: importance_weighted(x, advantages, ones), advantages),
        "gspo": (lambda x: gspo(x, logp, constant, where.mask, where.segment_ids, 0.2, 0.28)[0], constant),
    }
    for name, (function, expected) in cases.items():
        gradient = jax.grad(lambda x, f=function: f(x).sum())(logp)
        np.testing.assert_allclose(gradient, -expected, rtol=1e-6, err_msg=name)


def test_a_value_that_moved_far_towards_its_target_is_left_alone() -> None:
    """Old value 0, target 2, bound 0.5: from 0.5 on the loss is that at 0.5, and overshooting away costs in full."""
    old, target = jnp.zeros(5), jnp.full(5, 2.0)
    now = jnp.array([-1.0, 0.0, 0.25, 1.0, 4.0])
    value, slope = jax.value_and_grad(lambda v: clipped_value_loss(v, old, target, 0.5).sum())(now)
    np.testing.assert_allclose(clipped_value_loss(now, old, target, 0.5), [4.5, 2.0, 1.53125, 1.125, 2.0])
    np.testing.assert_allclose(slope, [-3.0, -2.0, -1.75, 0.0, 2.0])
    assert np.isfinite(value)
    np.testing.assert_allclose(clipped_value_loss(now, old, target, None), 0.5 * (np.asarray(now) - 2) ** 2)
    for fixed in (1, 2):
        slope = jax.grad(lambda *a: clipped_value_loss(*a, 0.5).sum(), argnums=fixed)(now, old, target)
        assert not np.asarray(slope).any(), "old values and targets are constants"

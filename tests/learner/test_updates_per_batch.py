"""Several updates of one batch: against the same updates written out, and what must not change them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.learner import step_cases
from tests.learner.step_cases import (
    MAX_TOKENS,
    WINDOW_TOKENS,
    Sequences,
    denominators,
    make_config,
    make_parameters,
    make_sequences,
    rising_rate,
    two_updates,
    two_updates_step,
)
from tunix_core.config_loading import load_recipe
from tunix_core.data.packing import PackedArrays, best_fit
from tunix_core.errors import ConfigError
from tunix_core.learner.batches import update_of_window
from tunix_core.learner.train_step import TrainStep
from tunix_core.learner.update import TrainState
from tunix_core.models.decoder import flatten_parameters

ALGORITHM = make_config().algorithm


@functools.cache
def compiled() -> TrainStep:
    return two_updates_step(1)


def update_of_sequence(sequences: Sequences) -> np.ndarray:
    """[N] with one window in a micro-batch: window i goes to update i mod 2."""
    return best_fit(sequences.lengths, WINDOW_TOKENS).window % 2


@functools.partial(jax.jit, static_argnames="hold_on_to_current")
def loss_of(params: Any, start: Any, sequences: Any, mask: Any, *, hold_on_to_current: bool) -> tuple[Any, Any]:
    """Decoupled PPO with a truncated weight and the unbiased leash, over unpacked trajectories; and its clip fraction."""
    tokens, valid, temperature, behavior, advantages = sequences
    current = step_cases._logprobs(params, tokens, valid, temperature)
    proximal = step_cases._logprobs(start, tokens, valid, temperature)
    if hold_on_to_current:
        proximal = jax.lax.stop_gradient(current)
    anchor = step_cases._logprobs(jax.tree.map(jnp.asarray, make_parameters(2)), tokens, valid, temperature)
    behavior = jnp.where(mask, behavior, proximal)
    weight = jnp.minimum(jnp.exp(proximal - behavior), ALGORITHM.importance_truncation)
    ratio = jnp.exp(current - proximal)
    low, high = 1 - ALGORITHM.clip_low, 1 + ALGORITHM.clip_high
    gain = jnp.where(advantages > 0, jnp.minimum(ratio, high), jnp.maximum(ratio, low)) * advantages
    leash = ratio * (jnp.exp(anchor - current) - 1 - (anchor - current))
    total = weight * (-gain + ALGORITHM.kl_coefficient * leash)
    clipped = jnp.where(advantages > 0, ratio > high, ratio < low)
    return (jnp.where(mask, total, 0).sum() / mask.sum(), (mask & clipped).sum() / mask.sum())


def written_out(sequences: Sequences, *, hold_on_to_current: bool = False) -> tuple[dict[str, np.ndarray], list[float]]:
    """Parameters after two plain steps, and the clip fraction of each."""
    valid = np.arange(MAX_TOKENS) < sequences.lengths[:, None]
    columns = (
        sequences.tokens,
        valid,
        sequences.temperature,
        sequences.behavior_logprobs,
        sequences.advantages[:, None],
    )
    start = params = jax.tree.map(jnp.asarray, make_parameters(1))
    fractions = []
    for k in range(2):
        mask = sequences.loss_mask & (update_of_sequence(sequences) == k)[:, None]
        gradient, fraction = jax.grad(loss_of, has_aux=True)(
            params, start, columns, mask, hold_on_to_current=hold_on_to_current
        )
        params = jax.tree.map(lambda leaf, slope: leaf - rising_rate(k) * slope, params, gradient)  # noqa: B023
        fractions.append(float(fraction))
    return flatten_parameters(params), fractions


def distance(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(first[name] - second[name]).max()) for name in first)


def test_two_updates_are_the_two_updates_written_out() -> None:
    sequences = make_sequences()
    found, metrics = two_updates(compiled(), sequences)
    wanted, (first, second) = written_out(sequences)
    assert distance(found, wanted) < 2e-5
    assert first == 0, "the first update starts at the proximal policy"
    assert second > 0, "and the second one is held by the clip"
    counts = denominators(compiled(), sequences.pack())
    assert metrics["clip_fraction"] == pytest.approx(second * counts[1] / counts.sum(), rel=1e-4)
    assert metrics["policy_tokens"] == counts.sum()
    assert metrics["kl_proximal"] > 0
    # The proximal policy is that of the start of the batch, not the current one.
    other, _ = written_out(sequences, hold_on_to_current=True)
    assert distance(found, other) > 1e-3


def run(batch: PackedArrays, denominator: np.ndarray) -> tuple[TrainState, dict[str, float]]:
    step = compiled()
    state, metrics = step(
        step.init_state(make_parameters(1)), step.put_reference(make_parameters(2)), step.put(batch), denominator
    )
    return jax.tree.map(np.array, state), {name: float(value) for name, value in metrics.items()}


def num_updates(state: TrainState) -> int:
    """That the optimizer counted; warm-up goes by it."""
    (count,) = (int(leaf) for leaf in jax.tree.leaves(state.opt_state))
    return count


@pytest.mark.parametrize("poisoned", [0, 1])
def test_a_non_finite_update_is_skipped_alone(poisoned: int) -> None:
    batch = make_sequences().pack()
    counts = denominators(compiled(), batch)
    update = update_of_window(len(batch.tokens), compiled().config)
    own = batch.loss_mask & (update == poisoned)[:, None]
    state, metrics = run(batch._replace(advantages=np.where(own, np.inf, batch.advantages).astype(np.float32)), counts)
    assert metrics["nonfinite"] == 1
    assert (int(state.step), num_updates(state)) == (1, 1)
    # … which leaves what the batch would be without those tokens.
    alone, metrics = run(
        batch._replace(loss_mask=batch.loss_mask & ~own), np.where(np.arange(2) == poisoned, 0, counts)
    )
    assert metrics["nonfinite"] == 0
    jax.tree.map(np.testing.assert_array_equal, state, alone)
    whole, metrics = run(batch, counts)
    assert metrics["nonfinite"] == 0
    assert (int(whole.step), num_updates(whole)) == (1, 2)


def test_an_update_without_policy_tokens_changes_nothing() -> None:
    """One window: there is nothing in the second update. And with none at all, nothing changes."""
    batch = make_sequences(1).pack()
    counts = denominators(compiled(), batch)
    assert counts[1] == 0
    state, metrics = run(batch, counts)
    assert num_updates(state) == 1
    assert all(np.isfinite(value) for value in metrics.values())
    state, metrics = run(batch._replace(loss_mask=np.zeros_like(batch.loss_mask)), np.zeros(2))
    assert (int(state.step), num_updates(state), metrics["loss"]) == (1, 0, 0.0)
    jax.tree.map(np.testing.assert_array_equal, state.params, make_parameters(1))


def test_empty_windows_change_nothing() -> None:
    sequences = make_sequences()
    found, metrics = run(sequences.pack(num_windows=12), denominators(compiled(), sequences.pack()))
    exact, exact_metrics = run(sequences.pack(), denominators(compiled(), sequences.pack()))
    assert metrics == pytest.approx(exact_metrics, rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=0), found, exact)


def test_one_denominator_for_each_update() -> None:
    with pytest.raises(AssertionError, match="one denominator per update"):
        run(make_sequences().pack(), np.float32([3]))


def test_windows_go_to_updates_by_micro_batches() -> None:
    config = make_config(windows_per_microbatch=2, updates_per_batch=3)
    assert update_of_window(9, config).tolist() == [0, 0, 1, 1, 2, 2, 0, 0, 1]


def test_more_updates_than_micro_batches_are_refused() -> None:
    options = {"learner.max_windows": 20, "learner.windows_per_microbatch": 4, "learner.groups_per_batch": 1}
    assert load_recipe("lookup", {**options, "learner.updates_per_batch": 5}).max_microbatches(256) == 5
    with pytest.raises(ConfigError, match=r"^learner.updates_per_batch: received 6, accepted 1 to 5"):
        load_recipe("lookup", {**options, "learner.updates_per_batch": 6})
    with pytest.raises(ConfigError, match=r"^learner.updates_per_batch"):
        load_recipe("lookup", {"learner.updates_per_batch": 0})

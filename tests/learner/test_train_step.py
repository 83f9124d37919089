"""One update: against the same update written out, and against itself in other shapes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.learner import step_cases
from tests.learner.step_cases import (
    MAX_TOKENS,
    WINDOW_TOKENS,
    Expected,
    make_config,
    make_parameters,
    make_sequences,
)
from tunix_core.config import OptimizerConfig, WarmStartConfig
from tunix_core.data.packing import PackedArrays
from tunix_core.distributed.compilation import CompilationCounter
from tunix_core.distributed.mesh import make_mesh
from tunix_core.errors import ConfigError
from tunix_core.learner.decoder_trainer import DecoderTrainer
from tunix_core.learner.train_step import TrainStep, make_optimizer, make_supervised_step, make_train_step
from tunix_core.learner.update import TrainState
from tunix_core.models.decoder import flatten_parameters


@functools.cache
def compiled(windows_per_microbatch: int = 2) -> TrainStep:
    config = make_config(windows_per_microbatch=windows_per_microbatch)
    step = make_train_step(config, make_mesh(config.mesh))
    step.compile(16)
    return step


@functools.cache
def expected() -> Expected:
    return step_cases.expected_update(make_config(), make_parameters(1), make_parameters(2), make_sequences())


def update(
    step: TrainStep, batch: PackedArrays, *, denominator: float | None = None, state: TrainState | None = None
) -> tuple[TrainState, dict[str, float]]:
    """The state after one step from `make_parameters(1)`, on the host, and its metrics."""
    state, metrics = step(
        step.init_state(make_parameters(1)) if state is None else state,
        step.put_reference(make_parameters(2)),
        step.put(batch),
        float(batch.loss_mask.sum()) if denominator is None else denominator,
    )
    return jax.tree.map(np.array, state), {name: float(value) for name, value in metrics.items()}


def assert_same_params(got: Any, wanted: dict[str, np.ndarray], start: Any, *, tolerance: float) -> None:
    """Within `tolerance` of the largest change of each tensor."""
    before = flatten_parameters(start)
    for name, leaf in flatten_parameters(got).items():
        largest = np.abs(wanted[name] - before[name]).max()
        np.testing.assert_allclose(leaf, wanted[name], atol=tolerance * largest, rtol=0, err_msg=name)


# ---- the update ---------------------------------------------------------------------------------


def test_packed_update_equals_the_unpacked_one_written_out() -> None:
    state, metrics = update(compiled(), make_sequences().pack())
    wanted = expected()
    assert metrics["loss"] == pytest.approx(wanted.loss, rel=1e-5)
    assert metrics["gradient_norm"] == pytest.approx(wanted.gradient_norm, rel=1e-5)
    assert wanted.gradient_norm > make_config().optimizer.gradient_clip_norm, "the clip of the norm acts"
    for name, value in wanted.metrics.items():
        assert metrics[name] == pytest.approx(value, rel=2e-4, abs=1e-6), name
    assert 0 < metrics["truncation_fraction"] < 1
    # Adam's first step is the gradient's sign: where it is next to 0, rounding decides.
    for name, leaf in flatten_parameters(state.params).items():
        clear = np.abs(wanted.gradient[name]) > 1e-4 * np.abs(wanted.gradient[name]).max()
        np.testing.assert_allclose(leaf[clear], wanted.params[name][clear], atol=2e-5, rtol=0, err_msg=name)
        assert clear.mean() > 0.5 or name == "embedding"
    first_moment = flatten_parameters(state.opt_state[1][0].mu)
    scale = make_config().optimizer.gradient_clip_norm / wanted.gradient_norm * (1 - make_config().optimizer.beta1)
    for name, leaf in first_moment.items():
        largest = np.abs(wanted.gradient[name]).max()
        np.testing.assert_allclose(leaf / scale, wanted.gradient[name], atol=2e-5 * largest, rtol=0, err_msg=name)


@pytest.mark.parametrize("windows_per_microbatch", [1, 4])
def test_micro_batches_of_any_size_are_one_batch(windows_per_microbatch: int) -> None:
    """5 windows in micro-batches of 1, 2 and 4: the last is ragged."""
    batch = make_sequences().pack()
    assert batch.tokens.shape[0] == 5
    whole, whole_metrics = update(compiled(2), batch)
    state, metrics = update(compiled(windows_per_microbatch), batch)
    for name, leaf in flatten_parameters(whole.opt_state[1][0].mu).items():
        other = flatten_parameters(state.opt_state[1][0].mu)[name]
        np.testing.assert_allclose(other, leaf, atol=1e-5 * np.abs(leaf).max(), rtol=0, err_msg=name)
    assert metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-6)


def test_empty_windows_change_nothing() -> None:
    exact, metrics = update(compiled(), make_sequences().pack())
    padded, padded_metrics = update(compiled(), make_sequences().pack(num_windows=12))
    assert padded_metrics == pytest.approx(metrics, rel=1e-6)
    for name, leaf in flatten_parameters(exact.opt_state[1][0].mu).items():
        other = flatten_parameters(padded.opt_state[1][0].mu)[name]
        np.testing.assert_allclose(other, leaf, atol=1e-6 * np.abs(leaf).max(), rtol=0, err_msg=name)


def test_the_same_inputs_give_the_same_bits() -> None:
    first, second = (update(compiled(), make_sequences().pack()) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_the_weights_that_sampled_have_ratio_one_at_their_temperature() -> None:
    sequences = make_sequences(temperature=0.7)
    own = step_cases.logprobs(make_parameters(1), sequences).astype(np.float32)
    on_policy = dataclasses.replace(sequences, behavior_logprobs=np.where(sequences.loss_mask, own, 0))
    _, metrics = update(compiled(), on_policy.pack())
    assert metrics["importance_ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["max_logprob_gap"] < 1e-5
    assert metrics["effective_sample_fraction"] == pytest.approx(1, abs=1e-5)
    assert metrics["truncation_fraction"] == 0
    hotter = dataclasses.replace(on_policy, temperature=np.ones_like(sequences.temperature))
    assert update(compiled(), hotter.pack())[1]["max_logprob_gap"] > 0.1


# ---- what must not matter, and what must not break ------------------------------------------------


def test_values_on_masked_tokens_cannot_matter() -> None:
    batch = make_sequences().pack()
    clean = update(compiled(), batch)
    assert clean[1]["nonfinite"] == 0
    mask = batch.loss_mask
    dirty = batch._replace(
        behavior_logprobs=np.where(mask, batch.behavior_logprobs, np.nan).astype(np.float32),
        advantages=np.where(mask, batch.advantages, np.inf).astype(np.float32),
        temperature=np.where(mask, batch.temperature, 0).astype(np.float32),
    )
    jax.tree.map(np.testing.assert_array_equal, update(compiled(), dirty), clean)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_non_finite_update_is_skipped_and_the_step_counts(poison: float) -> None:
    step, batch = compiled(), make_sequences().pack()
    before, _ = update(step, batch)
    advantages = batch.advantages.copy()
    advantages[batch.loss_mask] = poison
    after, metrics = update(step, batch._replace(advantages=advantages), state=step.put_state(before))
    assert metrics["nonfinite"] == 1
    assert int(after.step) == int(before.step) + 1 == 2
    jax.tree.map(np.testing.assert_array_equal, after._replace(step=0), before._replace(step=0))
    again, metrics = update(step, batch, state=step.put_state(after))
    assert metrics["nonfinite"] == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(again))


def test_a_batch_without_policy_tokens_is_harmless() -> None:
    batch = make_sequences().pack()
    step = compiled()
    state, metrics = update(step, batch._replace(loss_mask=np.zeros_like(batch.loss_mask)))
    assert metrics["nonfinite"] == 0
    assert metrics["loss"] == metrics["gradient_norm"] == metrics["policy_tokens"] == 0
    assert all(np.isfinite(value) for value in metrics.values())
    fresh = jax.tree.map(np.array, step.init_state(make_parameters(1)))
    jax.tree.map(np.testing.assert_array_equal, state._replace(step=0), fresh)


def test_the_state_is_given_up_and_the_reference_kept() -> None:
    """Both were made from the same arrays, as at the start of a run."""
    step = compiled()
    params = jax.tree.map(jax.device_put, make_parameters(1))
    state, reference = step.init_state(params), step.put_reference(params)
    batch = step.put(make_sequences().pack())
    step(state, reference, batch, 10.0)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    for kept in (params, reference):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(kept), make_parameters(1))


def test_windows_of_another_size_give_the_same_update() -> None:
    """11 trajectories of up to 16 tokens in windows of 24, and one or two to a window of 16."""
    config = make_config()
    step = make_train_step(config, make_mesh(config.mesh))
    for window_tokens in (WINDOW_TOKENS, MAX_TOKENS):
        step.compile(16, window_tokens)
    wide, narrow = make_sequences().pack(), make_sequences().pack(window_tokens=MAX_TOKENS)
    assert narrow.tokens.shape[1] == MAX_TOKENS < wide.tokens.shape[1]
    state, metrics = update(step, wide)
    other, other_metrics = update(step, narrow)
    assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    for name, leaf in flatten_parameters(state.opt_state[1][0].mu).items():
        found = flatten_parameters(other.opt_state[1][0].mu)[name]
        np.testing.assert_allclose(found, leaf, atol=1e-5 * np.abs(leaf).max(), rtol=0, err_msg=name)


def test_nothing_compiles_after_warm_up() -> None:
    step = compiled()
    batches = [make_sequences(num).pack() for num in (1, 5, 11, 20)]
    counter = CompilationCounter()
    update(step, batches[0])
    counter.warmed_up()
    for batch in batches:
        update(step, batch)
    assert counter.after_warmup == 0
    jax.jit(lambda x: x + 3)(np.zeros(7))
    assert counter.after_warmup > 0, "the counter counts"


def test_what_was_not_compiled_is_refused() -> None:
    step, batch = compiled(), make_sequences().pack()
    with pytest.raises(ConfigError, match=r"batch: received \(17, 24\), accepted at most 16 windows of 24 tokens"):
        step.put(make_sequences().pack(num_windows=17))
    with pytest.raises(ConfigError, match=r"received \(5, 23\)"):
        step.put(batch._replace(tokens=batch.tokens[:, :-1]))
    with pytest.raises(ConfigError, match=r"num_windows: received 3, accepted a multiple of .* = 2"):
        step.compile(3)
    config = make_config()
    with pytest.raises(ConfigError, match="mesh"):
        make_mesh(dataclasses.replace(config.mesh, data=2 * len(jax.devices())))


# ---- optimizer and warm start ---------------------------------------------------------------------


def test_the_learning_rate_warms_up_linearly() -> None:
    """With a constant gradient each of Adam's steps is as long as its learning rate."""
    options = OptimizerConfig(learning_rate=0.4, warmup_steps=4, gradient_clip_norm=1e9)
    optimizer = optax.with_extra_args_support(make_optimizer(options))

    @jax.jit
    def advance(state: Any) -> tuple[jax.Array, Any]:
        return optimizer.update(np.float32(1), state, np.float32(0), global_norm=np.float32(1))

    state = optimizer.init(np.float32(0))
    lengths = []
    for _ in range(6):
        step, state = advance(state)
        lengths.append(-float(step))
    np.testing.assert_allclose(lengths, [0.1, 0.175, 0.25, 0.325, 0.4, 0.4], rtol=1e-4)


def test_a_first_moment_in_bfloat16_is_kept_and_restored_to_the_bit() -> None:
    config = make_config(optimizer=OptimizerConfig(learning_rate=1e-2, first_moment_dtype="bfloat16"))
    trainer = DecoderTrainer(config)
    trainer.compile(16, WINDOW_TOKENS)
    state = trainer.initial_state(flatten_parameters(make_parameters(1)))
    reference = trainer.reference(flatten_parameters(make_parameters(2)))
    batch = make_sequences().pack()

    def step(state: TrainState) -> TrainState:
        return trainer.step(state, reference, trainer.put(batch), np.float32([batch.loss_mask.sum()]))[0]

    kept = trainer.to_host(step(state))
    moments = {name: value for name, value in kept.items() if ".mu." in name}
    assert moments
    assert all(value.dtype == jnp.bfloat16 and value.any() for value in moments.values())
    first, second = (trainer.to_host(step(trainer.from_host(kept))) for _ in range(2))
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])


def test_supervised_loss_is_the_mean_cross_entropy_and_falls() -> None:
    config = dataclasses.replace(make_config(), warm_start=WarmStartConfig(learning_rate=1e-2))
    step = make_supervised_step(config, make_mesh(config.mesh))
    step.compile(16)
    sequences = make_sequences(temperature=1.0)
    state = step.init_state(make_parameters(1))
    losses = []
    for _ in range(5):
        state, metrics = step(state, state.params, step.put(sequences.pack()), float(sequences.loss_mask.sum()))
        losses.append(float(metrics["loss"]))
    own = step_cases.logprobs(make_parameters(1), sequences)
    assert losses[0] == pytest.approx(-own[sequences.loss_mask].mean(), rel=1e-5)
    assert losses == sorted(losses, reverse=True)

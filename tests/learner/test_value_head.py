"""The value head: GAE and V-trace on packed windows against trajectories one by one, its updates, and where it lives."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.learner import step_cases
from tests.learner.objective_oracle import SEQUENCES, algorithm_of, along, clipped, derivative, divergence
from tests.learner.step_cases import (
    MAX_TOKENS,
    MODEL,
    Sequences,
    denominators,
    make_config,
    make_parameters,
    rising_rate,
    two_updates_step,
)
from tests.learner.test_updates_per_batch import distance, loss_of, update_of_sequence
from tests.rl.test_returns import gae_loop, vtrace_loop
from tunix_core.config import AlgorithmConfig
from tunix_core.data.packing import PackedArrays
from tunix_core.distributed.compilation import QUICK_ON_CPU
from tunix_core.errors import CorruptObject
from tunix_core.learner.decoder_trainer import DecoderTrainer
from tunix_core.learner.objectives import Batch, policy_objective
from tunix_core.learner.value_head import attached, detached, values
from tunix_core.models.decoder import flatten_parameters, hidden_states

MASK = SEQUENCES.loss_mask
REWARDS = np.where(
    MASK & (np.random.default_rng(0).random(MASK.shape) < 0.3), np.random.default_rng(1).normal(size=MASK.shape), 0
).astype(np.float32)

CASES: list[dict[str, Any]] = [
    {"advantage": "gae", "discount": 0.9, "trace_decay": 0.8},
    {
        "advantage": "gae",
        "loss": "ppo",
        "correction": "none",
        "kl_in": "reward",
        "kl_estimator": "k3",
        "aggregation": "sequence_mean",
        "value_clip": 0.0,
    },
    {"advantage": "gae", "loss": "vtrace", "correction": "none", "discount": 0.9, "trace_decay": 0.7},
]


def with_head(seed: int) -> Any:
    """`make_parameters`, and a head that says something."""
    rng = np.random.default_rng(100 + seed)
    head = {"weight": rng.normal(size=MODEL.model_width).astype(np.float32), "bias": np.float32(0.2 * seed)}
    return attached(make_parameters(seed), head)


def pack(sequences: Sequences = SEQUENCES, rewards: np.ndarray = REWARDS, **options: Any) -> PackedArrays:
    return sequences.pack(rewards=rewards, **options)


def to_batch(arrays: PackedArrays) -> Batch:
    return jax.tree.map(jnp.asarray, Batch(**{name: getattr(arrays, name) for name in Batch._fields}))


@functools.cache
def compiled(algorithm: AlgorithmConfig) -> Any:
    objective = policy_objective(MODEL, algorithm)
    return jax.jit(jax.value_and_grad(lambda *arguments: objective(*arguments)[0]), compiler_options=QUICK_ON_CPU)


@jax.jit
def unpacked_values(params: Any) -> jax.Array:
    """[N, T] each trajectory alone in its row: that of the state before each token."""
    valid = np.arange(MAX_TOKENS) < SEQUENCES.lengths[:, None]
    positions = jnp.broadcast_to(jnp.arange(MAX_TOKENS), valid.shape)
    found = values(params, hidden_states(params, MODEL, SEQUENCES.tokens, positions, valid.astype(jnp.int32)))
    return jnp.pad(found[:, :-1], ((0, 0), (1, 0)))


def estimates(a: AlgorithmConfig, logprobs: np.ndarray, anchor: np.ndarray, old: np.ndarray) -> tuple[np.ndarray, ...]:
    """Advantages and targets [N, T] in float64."""
    found = np.zeros((2, *MASK.shape))
    for i, mask in enumerate(MASK):
        paid = REWARDS[i, mask].astype(np.float64)
        p, b, ref, v = (x[i, mask].astype(np.float64) for x in (logprobs, SEQUENCES.behavior_logprobs, anchor, old))
        if a.kl_in == "reward":
            paid -= a.kl_coefficient * np.array(
                [divergence(a.kl_estimator, x, x, y) for x, y in zip(p, ref, strict=True)]
            )
        if a.loss == "vtrace":
            ratios = np.exp(p - b).tolist()
            found[:, i, mask] = vtrace_loop(
                paid.tolist(), v.tolist(), ratios, a.discount, a.importance_truncation, 1.0, a.trace_decay
            )
        else:
            own = np.array(gae_loop(paid.tolist(), v.tolist(), a.discount, a.trace_decay))
            found[:, i, mask] = own, own + v
    return found[0], found[1]


def oracle(
    a: AlgorithmConfig, p: np.ndarray, v: np.ndarray, start: tuple[np.ndarray, ...], anchor: np.ndarray
) -> float:
    """The loss in float64; `start` holds what has no gradient: log probabilities, values, advantages, targets."""
    per_sequence = []
    for i, mask in enumerate(MASK):
        losses = []
        for t in np.flatnonzero(mask):
            q, old, advantage, target = (float(x[i, t]) for x in start)
            b, own, ref = float(SEQUENCES.behavior_logprobs[i, t]), float(p[i, t]), float(anchor[i, t])
            loss = {
                "decoupled_ppo": lambda own=own, q=q, b=b, A=advantage: (
                    -min(math.exp(q - b), a.importance_truncation) * clipped(math.exp(own - q), A, 0)
                ),
                "ppo": lambda own=own, b=b, A=advantage: -clipped(math.exp(own - b), A, 0),
                "vtrace": lambda own=own, A=advantage: -A * own,
            }[a.loss]()
            if a.kl_in == "loss":
                w = min(math.exp(q - b), a.importance_truncation) if a.loss == "decoupled_ppo" else 1.0
                loss += a.kl_coefficient * w * divergence(a.kl_estimator, own, q, ref)
            errors = [float(v[i, t]) - target]
            if a.value_clip:
                errors.append(old + min(max(float(v[i, t]) - old, -a.value_clip), a.value_clip) - target)
            losses.append(loss + a.value_coefficient * max(e**2 for e in errors) / 2)
        per_sequence.append(losses)
    if a.aggregation == "sequence_mean":
        return float(np.mean([np.mean(losses) for losses in per_sequence]))
    return sum(map(sum, per_sequence)) / sum(map(len, per_sequence))


def denominator_of(a: AlgorithmConfig) -> float:
    return float(len(MASK) if a.aggregation == "sequence_mean" else MASK.sum())


@pytest.mark.parametrize("case", CASES, ids=["gae", "gae reward", "vtrace"])
def test_value_and_gradient_against_the_loop(case: dict[str, Any]) -> None:
    a = algorithm_of(case)
    params, reference = with_head(1), make_parameters(2)
    loss, gradient = compiled(a)(params, reference, to_batch(pack(num_windows=8)), denominator_of(a))
    current, anchor = step_cases.logprobs(params, SEQUENCES), step_cases.logprobs(reference, SEQUENCES)
    old = np.asarray(unpacked_values(params), np.float64)
    start = (current, old, *estimates(a, current, anchor, old))
    assert float(loss) == pytest.approx(oracle(a, current, old, start, anchor), rel=2e-5, abs=1e-6)

    slopes = np.zeros((2, *MASK.shape))
    for i, t in zip(*np.nonzero(MASK), strict=True):
        for which in range(2):
            ends = []
            for sign in (1e-5, -1e-5):
                moved = np.stack([current, old])
                moved[which, i, t] += sign
                ends.append(oracle(a, *moved, start, anchor))
            slopes[which, i, t] = (ends[0] - ends[1]) / 2e-5
    direction = with_head(3)
    move = jax.jvp(unpacked_values, (params,), (direction,))[1]
    expected = derivative(slopes[0], detached(params), detached(direction))
    expected += float((slopes[1] * np.asarray(move, np.float64)).sum())
    assert along(gradient, direction) == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("case", CASES, ids=["gae", "gae reward", "vtrace"])
def test_order_and_masked_values_cannot_matter(case: dict[str, Any]) -> None:
    a = algorithm_of(case)
    function = functools.partial(compiled(a), with_head(1), make_parameters(2))
    clean = pack(num_windows=8)
    wanted = function(to_batch(clean), denominator_of(a))
    mask = clean.loss_mask
    dirty = clean._replace(
        behavior_logprobs=np.where(mask, clean.behavior_logprobs, np.nan),
        advantages=np.full_like(clean.advantages, np.nan),  # the head gives them
        rewards=np.where(mask, clean.rewards, np.inf),
    )
    jax.tree.map(np.testing.assert_array_equal, function(to_batch(dirty), denominator_of(a)), wanted)

    order = np.random.default_rng(7).permutation(8)
    permuted = PackedArrays(*(column[order] for column in clean))
    assert (permuted.tokens != clean.tokens).any()
    found = function(to_batch(permuted), denominator_of(a))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5 * max(1, np.abs(y).max()), rtol=0), found, wanted
    )


# ---- two updates ----------------------------------------------------------------------------------


GAE: dict[str, Any] = {"advantage": "gae", "discount": 0.9, "trace_decay": 0.8}


@functools.partial(jax.jit, static_argnames="clip")
def value_loss_of(params: Any, old: Any, targets: Any, mask: Any, *, clip: float) -> jax.Array:
    now = unpacked_values(params)
    near = jnp.clip(now, old - clip, old + clip)
    return jnp.where(mask, jnp.maximum((now - targets) ** 2, (near - targets) ** 2) / 2, 0).sum() / mask.sum()


def written_out(a: AlgorithmConfig) -> dict[str, np.ndarray]:
    """Two plain steps, advantages and targets from the values at the start of the batch in both."""
    valid = np.arange(MAX_TOKENS) < SEQUENCES.lengths[:, None]
    start = params = jax.tree.map(jnp.asarray, with_head(1))
    old = np.asarray(unpacked_values(params), np.float64)
    current, anchor = step_cases.logprobs(params, SEQUENCES), step_cases.logprobs(make_parameters(2), SEQUENCES)
    advantages, targets = estimates(a, current, anchor, old)
    columns = (SEQUENCES.tokens, valid, SEQUENCES.temperature, SEQUENCES.behavior_logprobs, advantages)
    for k in range(2):
        mask = MASK & (update_of_sequence(SEQUENCES) == k)[:, None]
        policy, _ = jax.grad(loss_of, has_aux=True)(params, start, columns, mask, hold_on_to_current=False)
        value = jax.grad(value_loss_of)(params, old, targets, mask, clip=a.value_clip)
        slope = jax.tree.map(lambda x, y: x + a.value_coefficient * y, policy, value)
        params = jax.tree.map(lambda leaf, x: leaf - rising_rate(k) * x, params, slope)  # noqa: B023
    return flatten_parameters(params)


def test_two_updates_are_the_two_updates_written_out() -> None:
    step = two_updates_step(1, **GAE)
    batch = pack()
    state = step.init_state(make_parameters(1))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.params["value_head"])), "it starts at zero"
    state = step.put_state(jax.tree.map(np.array, state)._replace(params=with_head(1)))
    reference = step.put_reference(make_parameters(2))
    state, metrics = step(state, reference, step.put(batch), denominators(step, batch))
    found, wanted = flatten_parameters(state.params), written_out(step.config.algorithm)
    assert "value_head.weight" in found
    scale = max(float(np.abs(leaf).max()) for leaf in wanted.values())
    assert distance(found, wanted) < 1e-4 * scale
    assert metrics["nonfinite"] == 0
    old = np.asarray(unpacked_values(with_head(1)))
    assert float(metrics["value_mean"]) == pytest.approx(old[MASK].mean(), rel=1e-4)
    assert float(metrics["value_loss"]) > 0
    current, anchor = (step_cases.logprobs(make_parameters(seed), SEQUENCES) for seed in (1, 2))
    targets = estimates(step.config.algorithm, current, anchor, old.astype(np.float64))[1][MASK]
    explained = 1 - (targets - old[MASK]).var() / targets.var()
    assert float(metrics["explained_variance"]) == pytest.approx(explained, rel=1e-3)


# ---- where it lives -------------------------------------------------------------------------------


def test_it_is_in_checkpoints_and_never_published() -> None:
    trainer, plain = DecoderTrainer(make_config(**GAE)), DecoderTrainer(make_config())
    published = flatten_parameters(make_parameters(1))
    state = trainer.initial_state(published)
    state = state._replace(params=attached(state.params, jax.tree.map(jnp.asarray, with_head(1)["value_head"])))
    tensors = trainer.tensors(state)
    assert tensors.keys() == published.keys(), "an actor loads exactly the decoder"
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, published[name])
    kept = trainer.to_host(state)
    assert {name for name in kept if "value_head" in name} >= {"params.value_head.weight", "params.value_head.bias"}
    back = trainer.from_host(kept)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back.params), jax.device_get(state.params))
    assert not any("value_head" in name for name in plain.to_host(plain.initial_state(published)))
    for reader, written in ((plain, kept), (trainer, plain.to_host(plain.initial_state(published)))):
        with pytest.raises(CorruptObject, match="value_head"):
            reader.from_host(written)

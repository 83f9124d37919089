"""A tiny decoder, trajectories for it, and one update of it written out without packing, micro-batches or mesh."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tunix_core.config import (
    ActorConfig,
    AlgorithmConfig,
    LearnerConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
)
from tunix_core.data.packing import PackedArrays, best_fit, pack
from tunix_core.distributed.mesh import make_mesh
from tunix_core.learner.batches import update_of_window
from tunix_core.learner.objectives import policy_objective
from tunix_core.learner.train_step import TrainStep
from tunix_core.models import decoder

MODEL = ModelConfig(
    vocab_size=19, model_width=16, num_layers=1, num_heads=2, num_kv_heads=1, head_width=8, mlp_width=24
)
WINDOW_TOKENS = 24
MAX_TOKENS = 16
"""Of a trajectory."""


def make_config(
    *,
    windows_per_microbatch: int = 2,
    max_windows: int = 16,
    updates_per_batch: int = 1,
    optimizer: OptimizerConfig | None = None,
    **algorithm: Any,
) -> RunConfig:
    """Every part of the objective counts: a strong leash, a truncation that bites, a clip of the norm."""
    options: dict[str, Any] = {"importance_truncation": 1.3, "kl_coefficient": 0.5, **algorithm}
    return RunConfig(
        recipe="test",
        model=MODEL,
        algorithm=AlgorithmConfig(**options),
        optimizer=optimizer or OptimizerConfig(learning_rate=1e-2, gradient_clip_norm=0.2, weight_decay=0.1),
        learner=LearnerConfig(
            window_tokens=WINDOW_TOKENS,
            windows_per_microbatch=windows_per_microbatch,
            max_windows=max_windows,
            updates_per_batch=updates_per_batch,
        ),
        actor=ActorConfig(context_tokens=MAX_TOKENS),
    )


@functools.cache
def make_parameters(seed: int) -> decoder.Params:
    """Host arrays, larger than initial ones so that predictions differ."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype(np.float32), decoder.abstract_parameters(MODEL)
    )


@dataclasses.dataclass(frozen=True)
class Sequences:
    """N trajectories of at most T tokens, padded: the unpacked form of a batch."""

    lengths: np.ndarray  # int [N]
    tokens: np.ndarray  # int32 [N, T]
    loss_mask: np.ndarray  # bool [N, T]
    behavior_logprobs: np.ndarray  # float32 [N, T]
    advantages: np.ndarray  # float32 [N]
    temperature: np.ndarray  # float32 [N]
    equal_version: np.ndarray  # bool [N]

    def pack(
        self, num_windows: int | None = None, rewards: np.ndarray | None = None, window_tokens: int = WINDOW_TOKENS
    ) -> PackedArrays:
        """Into exactly as many windows as they need, or so many."""
        layout = best_fit(self.lengths, window_tokens)
        valid = np.arange(self.tokens.shape[1]) < self.lengths[:, None]
        return pack(
            layout,
            self.lengths,
            tokens=self.tokens[valid],
            loss_mask=self.loss_mask[valid],
            behavior_logprobs=self.behavior_logprobs[valid],
            advantages=self.advantages,
            temperature=self.temperature,
            equal_version=self.equal_version,
            rewards=None if rewards is None else rewards[valid],
            num_windows=layout.num_windows if num_windows is None else num_windows,
            window_tokens=window_tokens,
        )


def make_sequences(num: int = 11, *, temperature: float = 0.8) -> Sequences:
    """Random ones; behavior log probabilities are those of other parameters, so the ratio is not 1."""
    rng = np.random.default_rng(num)
    lengths = rng.integers(4, MAX_TOKENS + 1, num)
    tokens = rng.integers(0, MODEL.vocab_size, (num, MAX_TOKENS)).astype(np.int32)
    valid = np.arange(MAX_TOKENS) < lengths[:, None]
    mask = (rng.random(tokens.shape) < 0.6) & valid
    mask[:, 0] = False
    mask[:, 1] = True
    heat = np.full(num, temperature, np.float32)
    behavior = np.asarray(_logprobs(make_parameters(5), tokens, valid, heat))
    return Sequences(
        lengths=lengths,
        tokens=tokens,
        loss_mask=mask,
        behavior_logprobs=np.where(mask, behavior, 0).astype(np.float32),
        advantages=rng.normal(size=num).astype(np.float32),
        temperature=heat,
        equal_version=np.arange(num) % 3 == 1,
    )


@jax.jit
def _logprobs(params: decoder.Params, tokens: jax.Array, valid: jax.Array, temperature: jax.Array) -> jax.Array:
    """Each trajectory alone in its row, all logits at once -> [N, T]; entry 0 is 0."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    states = decoder.hidden_states(params, MODEL, tokens, positions, valid.astype(jnp.int32))
    logits = states @ params["head"] / temperature[:, None, None]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(chosen, ((0, 0), (1, 0)))


def logprobs(params: decoder.Params, sequences: Sequences) -> np.ndarray:
    """float64 [N, T]"""
    valid = np.arange(MAX_TOKENS) < sequences.lengths[:, None]
    return np.asarray(_logprobs(params, sequences.tokens, valid, sequences.temperature), np.float64)


# ---- two updates of a batch -----------------------------------------------------------------------


def rising_rate(count: Any) -> Any:
    """By the number of updates before this one."""
    return 1.0 + count


def two_updates_step(windows_per_microbatch: int, **algorithm: Any) -> TrainStep:
    """Two plain gradient steps per batch, with a rate that rises from one to the next."""
    config = make_config(windows_per_microbatch=windows_per_microbatch, updates_per_batch=2, **algorithm)
    step = TrainStep(
        config,
        make_mesh(config.mesh),
        objective=policy_objective(config.model, config.algorithm),
        optimizer=optax.sgd(rising_rate),
        num_updates=2,
    )
    step.compile(16)
    return step


def denominators(step: TrainStep, batch: PackedArrays) -> np.ndarray:
    """Policy tokens of each of the step's updates."""
    update = update_of_window(len(batch.tokens), step.config)
    return np.array([batch.loss_mask[update == k].sum() for k in range(step.plan.num_updates)], np.float32)


def two_updates(step: TrainStep, sequences: Sequences) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Parameters and metrics after one batch from `make_parameters(1)`."""
    batch = sequences.pack()
    state, metrics = step(
        step.init_state(make_parameters(1)),
        step.put_reference(make_parameters(2)),
        step.put(batch),
        denominators(step, batch),
    )
    return decoder.flatten_parameters(state.params), {name: float(value) for name, value in metrics.items()}


# ---- one update written out -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Expected:
    """What one update must give."""

    loss: float
    gradient: dict[str, np.ndarray]
    gradient_norm: float
    params: dict[str, np.ndarray]
    metrics: dict[str, float]


def expected_update(
    config: RunConfig, params: decoder.Params, reference: decoder.Params, sequences: Sequences
) -> Expected:
    """DESIGN's objective and AdamW's first step, in float64 but for the decoder's own passes."""
    algorithm, mask = config.algorithm, sequences.loss_mask
    current, anchor = logprobs(params, sequences), logprobs(reference, sequences)
    ratio = np.exp(current - np.where(mask, sequences.behavior_logprobs, current))
    weight = np.minimum(ratio, algorithm.importance_truncation)
    log_r = anchor - current
    k3 = np.exp(log_r) - 1 - log_r
    count = mask.sum()
    per_token = weight * (-sequences.advantages[:, None] + algorithm.kl_coefficient * k3)
    loss = per_token[mask].sum() / count
    # d k3 = (1 - r) d logprob; the ratio in front, at its value 1, adds k3 d logprob.
    factor = weight * (-sequences.advantages[:, None] + algorithm.kl_coefficient * (1 - np.exp(log_r) + k3)) / count
    valid = np.arange(MAX_TOKENS) < sequences.lengths[:, None]
    cotangent = np.where(mask, factor, 0).astype(np.float32)
    pull = jax.jit(
        lambda p: jax.vjp(lambda q: _logprobs(q, sequences.tokens, valid, sequences.temperature), p)[1](cotangent)[0]
    )
    gradient = {k: v.astype(np.float64) for k, v in decoder.flatten_parameters(pull(params)).items()}
    norm = float(np.sqrt(sum((leaf**2).sum() for leaf in gradient.values())))
    raw = ratio[mask]
    gap = np.abs(current - sequences.behavior_logprobs)[mask]
    same = np.abs(current - sequences.behavior_logprobs)[mask & sequences.equal_version[:, None]]
    log_b = (current - sequences.behavior_logprobs)[mask]
    return Expected(
        loss=loss,
        gradient=gradient,
        gradient_norm=norm,
        params=first_adamw_step(config.optimizer, decoder.flatten_parameters(params), gradient, norm),
        metrics={
            "policy_tokens": count,
            "kl_reference": k3[mask].mean(),
            "kl_behavior": (np.exp(log_b) - 1 - log_b).mean(),
            "importance_ratio": raw.mean(),
            "truncation_fraction": (raw > algorithm.importance_truncation).mean(),
            "clip_fraction": 0.0,
            "effective_sample_fraction": raw.sum() ** 2 / (len(raw) * (raw**2).sum()),
            "chi_squared": (raw**2).mean() - 1,
            "max_logprob_gap": gap.max(),
            "kl_proximal": 0.0,
            "equal_version_tokens": len(same),
            "logprob_gap_equal_version": same.mean(),
            "max_logprob_gap_equal_version": same.max(),
        },
    )


def first_adamw_step(
    config: OptimizerConfig, params: dict[str, np.ndarray], gradient: dict[str, np.ndarray], norm: float
) -> dict[str, np.ndarray]:
    """After one step the bias-corrected moments are the clipped gradient and its square."""
    scale = min(1.0, config.gradient_clip_norm / norm)
    rate = config.learning_rate / max(config.warmup_steps, 1)
    updated = {}
    for name, leaf in params.items():
        clipped = gradient[name] * scale
        direction = clipped / (np.abs(clipped) + 1e-8) + config.weight_decay * leaf
        updated[name] = leaf - rate * direction
    return updated

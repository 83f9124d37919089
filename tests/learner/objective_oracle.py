"""The policy objective written out for trajectories one by one, in float64, for every choice of the algorithm."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.learner import step_cases
from tests.learner.step_cases import MAX_TOKENS, MODEL, make_sequences
from tunix_core.config import AlgorithmConfig
from tunix_core.distributed.compilation import QUICK_ON_CPU
from tunix_core.learner.objectives import Batch, policy_objective
from tunix_core.rl import aggregation

SEQUENCES = make_sequences()
LOW, HIGH = 0.2, 0.28
BAND = (0.7, 1.4)

CASES: list[dict[str, Any]] = [
    {},
    {"correction": "truncate_sequence"},
    {"correction": "mask"},
    {"correction": "mask_sequence"},
    {"loss": "ppo", "correction": "none"},
    {"loss": "ppo", "correction": "none", "dual_clip": 1.5},
    {"loss": "gspo", "correction": "none", "aggregation": "sequence_mean"},
    {"loss": "cispo", "correction": "none"},
    {"loss": "policy_gradient"},
    {"aggregation": "sequence_mean"},
    {"aggregation": "constant_length", "constant_tokens": 13},
    {"kl_estimator": "k2"},
    {"kl_estimator": "k3", "correction": "mask"},
    {"kl_estimator": "k1", "kl_in": "reward"},
    {"kl_estimator": "k3", "kl_in": "reward", "loss": "cispo", "correction": "none"},
    {"kl_coefficient": 0.0},
]


def algorithm_of(case: dict[str, Any]) -> AlgorithmConfig:
    defaults = {"importance_truncation": 1.3, "kl_coefficient": 0.5, "mask_low": BAND[0], "mask_high": BAND[1]}
    return AlgorithmConfig(**{**defaults, **case})


@functools.cache
def compiled(algorithm: AlgorithmConfig) -> Callable[..., tuple[jax.Array, Any]]:
    """(parameters, reference, batch, denominator) -> loss and gradient."""
    objective = policy_objective(MODEL, algorithm)
    return jax.jit(jax.value_and_grad(lambda *arguments: objective(*arguments)[0]), compiler_options=QUICK_ON_CPU)


def make_batch() -> Batch:
    """With three empty windows."""
    arrays = SEQUENCES.pack(num_windows=8)
    return jax.tree.map(jnp.asarray, Batch(**{name: getattr(arrays, name) for name in Batch._fields}))


def correction_of(a: AlgorithmConfig, ratios: list[float]) -> list[float]:
    product = math.prod(ratios)
    inside = BAND[0] <= product ** (1 / len(ratios)) <= BAND[1]
    return {
        "truncate": [min(r, a.importance_truncation) for r in ratios],
        "truncate_sequence": [min(product, a.importance_truncation)] * len(ratios),
        "mask": [r if BAND[0] <= r <= BAND[1] else 0.0 for r in ratios],
        "mask_sequence": [float(inside)] * len(ratios),
        "none": [1.0] * len(ratios),
    }[a.correction]


def divergence(name: str, p: float, proximal: float, reference: float) -> float:
    r = math.exp(reference - p)
    k3 = r - 1 - math.log(r)
    return {"k1": p - reference, "k2": (reference - p) ** 2 / 2, "k3": k3, "unbiased": math.exp(p - proximal) * k3}[
        name
    ]


def clipped(ratio: float, advantage: float, dual_clip: float) -> float:
    value = min(ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage)
    return max(value, dual_clip * advantage) if dual_clip and advantage < 0 else value


def sequence_loss(
    a: AlgorithmConfig,
    logprobs: list[float],
    proximal: list[float],
    behavior: list[float],
    reference: list[float],
    advantage: float,
) -> list[float]:
    """Loss per policy token of one trajectory, leash included; `proximal` stands for what has no gradient."""
    weights = correction_of(a, [math.exp(q - b) for q, b in zip(proximal, behavior, strict=True)])
    mean = sum(p - b for p, b in zip(logprobs, behavior, strict=True)) / len(logprobs)
    out = []
    for p, q, b, ref, w in zip(logprobs, proximal, behavior, reference, weights, strict=True):
        own = advantage
        if a.kl_in == "reward":
            own -= a.kl_coefficient * divergence(a.kl_estimator, q, q, ref)
        loss = {
            "decoupled_ppo": lambda own=own, p=p, q=q, w=w: -w * clipped(math.exp(p - q), own, a.dual_clip),
            "ppo": lambda own=own, p=p, b=b: -clipped(math.exp(p - b), own, a.dual_clip),
            "gspo": lambda own=own: -clipped(math.exp(mean), own, 0),
            "cispo": lambda own=own, p=p, q=q, b=b: -min(max(math.exp(q - b), 1 - LOW), 1 + HIGH) * own * p,
            "policy_gradient": lambda own=own, p=p, w=w: -w * own * p,
        }[a.loss]()
        if a.kl_in == "loss":
            loss += a.kl_coefficient * w * divergence(a.kl_estimator, p, q, ref)
        out.append(loss)
    return out


def oracle(a: AlgorithmConfig, logprobs: np.ndarray, proximal: np.ndarray, reference: np.ndarray) -> float:
    """The batch's loss in float64."""
    losses = []
    for i, mask in enumerate(SEQUENCES.loss_mask):
        rows = (
            x[i, mask].astype(np.float64).tolist() for x in (logprobs, proximal, SEQUENCES.behavior_logprobs, reference)
        )
        losses.append(sequence_loss(a, *rows, float(SEQUENCES.advantages[i])))
    if a.aggregation == "token_mean":
        return sum(map(sum, losses)) / sum(map(len, losses))
    if a.aggregation == "sequence_mean":
        return sum(sum(tokens) / len(tokens) for tokens in losses) / len(losses)
    return sum(map(sum, losses)) / (len(losses) * a.constant_tokens)


def denominator_of(a: AlgorithmConfig) -> float:
    """Of the whole batch."""
    return aggregation.denominator(
        a.aggregation,
        num_policy_tokens=int(SEQUENCES.loss_mask.sum()),
        num_sequences=len(SEQUENCES.lengths),
        constant_tokens=a.constant_tokens,
    )


def derivative(slope: np.ndarray, params: Any, direction: Any) -> float:
    """Of the loss along a direction of the parameters, from its slope in each log probability."""
    valid = np.arange(MAX_TOKENS) < SEQUENCES.lengths[:, None]
    logprobs = lambda p: step_cases._logprobs(p, SEQUENCES.tokens, valid, SEQUENCES.temperature)  # noqa: E731
    move = jax.jvp(logprobs, (params,), (direction,))[1]
    return float((slope * np.asarray(move, np.float64)).sum())


def along(gradient: Any, direction: Any) -> float:
    """The same from the gradient in the parameters."""
    leaves = zip(*map(jax.tree.leaves, (gradient, direction)), strict=True)
    return sum(float((g * d).sum()) for g, d in leaves)


def slopes(a: AlgorithmConfig, current: np.ndarray, reference: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """[N, T]: the loss's derivative to each log probability, by central differences; what is constant stays."""
    found = np.zeros(current.shape)
    for i, t in zip(*np.nonzero(SEQUENCES.loss_mask), strict=True):
        ends = []
        for sign in (1, -1):
            moved = current.copy()
            moved[i, t] += sign * step
            ends.append(oracle(a, moved, current, reference))
        found[i, t] = (ends[0] - ends[1]) / (2 * step)
    return found

"""What the learner's benchmark works on: three models and synthetic trajectories of agentic lengths.

Lengths are lognormal with a mean of 300 tokens, cut to 16 to 4,096. They are the distribution's own
quantiles in random order, so that a small batch has its long tail too, and two seeds differ only in
which trajectory is long. Token values do not matter to speed; behavior log probabilities lie near
those of an untrained model, so that the loss is one that training could meet.

Two files carry it to the contestants, which may lack our packages: arrays (`.npz`) and sizes (`.json`).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from tunix_core.config import (
    ActorConfig,
    AlgorithmConfig,
    LearnerConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
)
from tunix_core.data.packing import Layout, PackedArrays, best_fit, pack

MEAN_TOKENS = 300
SIGMA = 1.0
"""Of the lengths' logarithm: the median is 182, one trajectory in twenty is longer than 943."""
MIN_TOKENS = 16
MAX_TOKENS = 4096
WINDOW_TOKENS = 4096
"""The longest trajectory just fits: no window is larger than it must be, and 512 trajectories make about 38."""
GROUP_SIZE = 8

MODELS = {
    "small": ModelConfig(
        vocab_size=300, model_width=64, num_layers=2, num_heads=4, num_kv_heads=2, head_width=16, mlp_width=192
    ),
    "4.5M": ModelConfig(
        vocab_size=2048, model_width=256, num_layers=4, num_heads=4, num_kv_heads=2, head_width=64, mlp_width=864
    ),
    "34M": ModelConfig(
        vocab_size=8192, model_width=512, num_layers=8, num_heads=8, num_kv_heads=4, head_width=64, mlp_width=1536
    ),
}


@dataclasses.dataclass(frozen=True)
class Trajectories:
    """N trajectories, their tokens one after another."""

    lengths: np.ndarray  # int64 [N]
    tokens: np.ndarray  # int32 [sum of lengths]
    loss_mask: np.ndarray  # bool [sum of lengths]
    behavior_logprobs: np.ndarray  # float32 [sum of lengths]
    advantages: np.ndarray  # float32 [N]
    temperature: np.ndarray  # float32 [N]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def pack(self, layout: Layout, num_windows: int | None = None) -> PackedArrays:
        """Into windows of `WINDOW_TOKENS`, as many as the layout needs or so many."""
        return pack(
            layout,
            self.lengths,
            tokens=self.tokens,
            loss_mask=self.loss_mask,
            behavior_logprobs=self.behavior_logprobs,
            advantages=self.advantages,
            temperature=self.temperature,
            num_windows=layout.num_windows if num_windows is None else num_windows,
            window_tokens=WINDOW_TOKENS,
        )

    def fit(self) -> Layout:
        return best_fit(self.lengths, WINDOW_TOKENS)

    def one_per_window(self) -> Layout:
        """What padding makes of them."""
        num = len(self.lengths)
        return Layout(np.arange(num, dtype=np.int32), np.zeros(num, np.int32), num)


def agentic_lengths(num: int, seed: int) -> np.ndarray:
    """int64 [num]"""
    normal = NormalDist(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA)
    quantiles = np.exp([normal.inv_cdf((i + 0.5) / num) for i in range(num)])
    lengths = np.clip(quantiles, MIN_TOKENS, MAX_TOKENS).astype(np.int64)
    return np.random.default_rng(seed).permutation(lengths)


def random_lengths(num: int, seed: int) -> np.ndarray:
    """int64 [num]: drawn, so that every seed has another sum and another longest."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA, num)
    return np.clip(drawn, MIN_TOKENS, MAX_TOKENS).astype(np.int64)


def make_trajectories(lengths: np.ndarray, vocab_size: int, seed: int) -> Trajectories:
    """A prompt of a quarter, then policy tokens with every fifth from the environment; temperature 1."""
    rng = np.random.default_rng(seed)
    total = int(lengths.sum())
    within = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    prompt = np.repeat(np.maximum(lengths // 4, 1), lengths)
    mask = (within >= prompt) & (rng.random(total) < 0.8)
    behavior = -np.log(vocab_size) + 0.1 * rng.normal(size=total)
    return Trajectories(
        lengths=lengths,
        # 0 and 1 stay free: peers pad and end with them.
        tokens=rng.integers(2, vocab_size, total).astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, behavior, 0).astype(np.float32),
        advantages=rng.normal(size=len(lengths)).astype(np.float32),
        temperature=np.ones(len(lengths), np.float32),
    )


def run_config(model: ModelConfig, num_trajectories: int) -> RunConfig:
    """The defaults: decoupled PPO, truncated weights, unbiased KL to the reference, AdamW behind a norm clip."""
    return RunConfig(
        recipe="benchmark",
        model=model,
        algorithm=AlgorithmConfig(group_size=GROUP_SIZE),
        optimizer=OptimizerConfig(warmup_steps=0),
        learner=LearnerConfig(
            window_tokens=WINDOW_TOKENS,
            windows_per_microbatch=1,
            groups_per_batch=-(-num_trajectories // GROUP_SIZE),
        ),
        actor=ActorConfig(context_tokens=MAX_TOKENS),
    )


def count_parameters(model: ModelConfig) -> int:
    heads, kv_heads = model.num_heads * model.head_width, model.num_kv_heads * model.head_width
    layer = 2 * model.model_width * (heads + kv_heads) + 3 * model.model_width * model.mlp_width + 2 * model.model_width
    return 2 * model.vocab_size * model.model_width + model.num_layers * layer + model.model_width


def save(folder: Path, config: RunConfig, trajectories: Trajectories, params: dict[str, Any]) -> Path:
    """`work.npz` and `work.json` for the contestants; `params` are flat tensors, those of the reference named `reference.…`."""
    arrays = {f"trajectory.{name}": value for name, value in vars(trajectories).items()}
    np.savez(folder / "work.npz", **arrays, **params)
    sections = ("model", "algorithm", "optimizer")
    settings = {name: dataclasses.asdict(getattr(config, name)) for name in sections}
    settings["num_trajectories"] = len(trajectories.lengths)
    (folder / "work.json").write_text(json.dumps(settings, indent=1))
    return folder

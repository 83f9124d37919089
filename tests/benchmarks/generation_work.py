"""What the actor's benchmark generates: two models and requests of equal or of agentic lengths.

A request is a prompt and the number of tokens to answer with: nobody stops on an id, so every contestant keeps
the same tokens, whatever it draws. Agentic numbers are lognormal, as episodes are; they are the distribution's own
quantiles in random order, so that a small set has its long tail too.

Weights are an untrained model's with a wider head, so that distributions are far from uniform, and with one
hidden unit that nothing changes: through it the ids that peers pad and end with are never drawn.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import jax
import numpy as np

from tunix_core.config import ModelConfig
from tunix_core.models.decoder import Params, flatten_parameters, init_parameters

Kind = Literal["equal", "agentic"]
KINDS: tuple[Kind, ...] = ("equal", "agentic")

MODELS = {
    "small": ModelConfig(
        vocab_size=8192, model_width=128, num_layers=2, num_heads=4, num_kv_heads=2, head_width=32, mlp_width=384,
        # google-tunix's Llama3 turns positions with this theta whatever its configuration says.
        rope_theta=1e6,
    ),
    "medium": ModelConfig(
        vocab_size=8192, model_width=256, num_layers=6, num_heads=8, num_kv_heads=4, head_width=32, mlp_width=768,
        rope_theta=1e6,
    ),
}  # fmt: skip

EQUAL_PROMPT, EQUAL_NEW = 64, 128
MEAN_PROMPT, SIGMA_PROMPT, PROMPT_RANGE = 64, 0.5, (16, 256)
MEAN_NEW, SIGMA_NEW, NEW_RANGE = 128, 1.0, (8, 768)
"""As the learner's trajectories: one answer in twenty is over three times the mean."""
NUM_RESERVED = 2
"""Ids that are in no prompt and never drawn: padding and end."""
HEAD_SCALE = 8.0
CONSTANT_UNIT = 0
CONSTANT = 0.05


@dataclasses.dataclass(frozen=True)
class Requests:
    """N requests, their prompts one after another."""

    prompt_lengths: np.ndarray  # int64 [N]
    prompt_tokens: np.ndarray  # int32 [sum of prompt_lengths]
    num_new: np.ndarray  # int64 [N]

    @property
    def num_kept(self) -> int:
        return int(self.num_new.sum())

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer."""
        return int((self.prompt_lengths + self.num_new).max())

    def prompts(self) -> list[list[int]]:
        ends = np.cumsum(self.prompt_lengths)[:-1]
        return [part.tolist() for part in np.split(self.prompt_tokens, ends)]


def _quantiles(num: int, mean: float, sigma: float, limits: tuple[int, int], seed: int) -> np.ndarray:
    normal = NormalDist(np.log(mean) - sigma**2 / 2, sigma)
    values = np.exp([normal.inv_cdf((i + 0.5) / num) for i in range(num)])
    return np.random.default_rng(seed).permutation(np.clip(values, *limits).astype(np.int64))


def make_requests(kind: Kind, num: int, vocab_size: int, seed: int = 0) -> Requests:
    if kind == "equal":
        prompts, num_new = np.full(num, EQUAL_PROMPT), np.full(num, EQUAL_NEW)
    else:
        prompts = _quantiles(num, MEAN_PROMPT, SIGMA_PROMPT, PROMPT_RANGE, seed)
        num_new = _quantiles(num, MEAN_NEW, SIGMA_NEW, NEW_RANGE, seed + 1)
    tokens = np.random.default_rng(seed).integers(NUM_RESERVED, vocab_size, int(prompts.sum()), np.int32)
    return Requests(prompts, tokens, num_new)


def make_weights(model: ModelConfig, seed: int = 0) -> Params:
    """Writable arrays on the host."""
    params = jax.tree.map(np.array, init_parameters(model, seed))
    params["head"] *= HEAD_SCALE
    params["embedding"][:, CONSTANT_UNIT] = CONSTANT
    params["blocks"]["attention"]["output"]["weight"][..., CONSTANT_UNIT] = 0
    params["blocks"]["mlp"]["down"]["weight"][..., CONSTANT_UNIT] = 0
    params["head"][CONSTANT_UNIT] = 0
    params["head"][CONSTANT_UNIT, :NUM_RESERVED] = -1e3
    return params


def save(folder: Path, model: ModelConfig, requests: Requests, batch: int, params: Params) -> None:
    """`work.npz` and `work.json` for the contestants, which may lack our packages."""
    arrays = {f"request.{name}": value for name, value in vars(requests).items()}
    arrays |= {f"policy.{name}": np.asarray(value) for name, value in flatten_parameters(params).items()}
    np.savez(folder / "work.npz", **arrays)
    settings: dict[str, Any] = {"model": dataclasses.asdict(model), "batch": batch}
    (folder / "work.json").write_text(json.dumps(settings, indent=1))

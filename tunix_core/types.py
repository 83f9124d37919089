"""The values that cross module boundaries. Words and units as in CONTRIBUTING (notation)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

SCHEMA_VERSION = 2
"""Version of the trajectory shard schema, stored in the Parquet metadata."""

SPLITS = ("train", "held_out")
"""Of the tasks: what is trained on, and what is kept for evaluations."""

TRUNCATIONS = ("truncated", "max_turns", "max_turn_tokens", "max_tokens", "max_seconds", "max_forks")
"""Finish reasons of episodes that a limit ended; `truncated`: the environment's own."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One policy message or what came back; token indices are half open `[start, end)`."""

    role: str
    """`prompt`, `policy` or `tool`."""
    start: int
    end: int
    reward: float = 0.0
    tool_name: str = ""
    tool_ok: bool = True
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory:
    """One token sequence of one episode. T is `num_tokens`.

    `tokens`, `loss_mask`, `behavior_logprobs` and `token_policy_version` are aligned: entry t
    describes token t itself, not its successor. Where `loss_mask` is false, `behavior_logprobs`
    is 0 and `token_policy_version` is -1.
    """

    trajectory_id: str
    episode_id: str
    group_id: str
    group_size: int
    task_id: str
    environment: str
    task_seed: int
    split: str
    actor_id: str
    incarnation: str
    created_at: float
    """Seconds since the epoch, by the writer's clock."""
    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    behavior_logprobs: np.ndarray  # float32 [T]
    token_policy_version: np.ndarray  # int32 [T]
    temperature: float
    turns: Sequence[Turn]
    reward: float
    reward_components: Mapping[str, float]
    finish_reason: str
    """`completed`, `failed` (the environment), or one of `TRUNCATIONS`; the episode's, in each of its trajectories."""
    generation_seconds: float
    environment_seconds: float
    messages: str
    """JSON list of `{"role", "content"}` for people; nothing re-encodes it."""
    fork_index: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_policy_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def policy_version_min(self) -> int:
        """Oldest version among the policy tokens; staleness counts from it."""
        return int(self.token_policy_version[self.loss_mask].min()) if self.loss_mask.any() else -1

    @property
    def policy_version_max(self) -> int:
        return int(self.token_policy_version[self.loss_mask].max()) if self.loss_mask.any() else -1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, order=True)
class RowRef:
    """Where a trajectory lives: shards are immutable, so this names it for ever."""

    shard: str
    """Key of the shard within the run."""
    row: int


Order = Literal["oldest_first", "freshest_first", "largest_advantage_first"]
"""Which of the groups that wait make the next batch."""
LEDGER_CLASSES = (
    "consumed",
    "stale",
    "duplicate",
    "quarantined",
    "filtered",
    "overlong",
    "surplus",
    "buffered",
)
"""Every token read is in exactly one class: `read` equals their sum at every step."""

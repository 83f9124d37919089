"""What an episode is before it is played, and what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tunix_core.config import RunConfig
from tunix_core.tokenizer import Tokenizer
from tunix_core.types import Trajectory
from tunix_core.validation import require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeSpec:
    """One attempt at one member of a group."""

    group_id: str
    group_size: int
    member: int
    task_id: str
    task_seed: int
    attempt: int = 0
    """Counts the failures before it."""

    @property
    def episode_id(self) -> str:
        return f"{self.group_id}-{self.member:03d}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Who writes, and how it samples."""

    actor_id: str
    incarnation: str
    environment: str
    temperature: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What an episode may take; each that ends one has a finish reason or a kind of failure of its own."""

    max_turns: int
    max_forks: int
    step_seconds: float
    """Deadline of one reset or step."""
    episode_seconds: float
    """After it no turn begins, and one in which the policy still speaks fails."""
    max_observation_bytes: int
    """Longer answers are cut, longer questions refused."""


Episode = Sequence[Trajectory]
"""The trajectories of one episode in the order of their forks, at least one; all carry the episode's whole reward."""


class EpisodeFailed(Exception):
    """No trajectory came of it; `kind` is what the failure is counted under.

    Args:
        retryable: another attempt might go better.
    """

    def __init__(self, kind: str, detail: str, *, retryable: bool = True) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.retryable = retryable


Outcome = Episode | EpisodeFailed


def limits_of(config: RunConfig, tokenizer: Tokenizer) -> Limits:
    """
    Raises:
        ConfigError: the tokenizer's conversations may fork, and the run does not reckon with it.
    """
    require(
        config.actor.max_forks > 0 or not tokenizer.may_fork,
        "actor.max_forks",
        config.actor.max_forks,
        "at least 1 with a chat template that rewrites earlier turns",
        "Such a turn begins another trajectory: allow up to actor.max_turns - 1 of them an episode.",
    )
    return Limits(
        max_turns=config.actor.max_turns,
        max_forks=config.actor.max_forks,
        step_seconds=config.environment.timeout_seconds,
        episode_seconds=config.actor.episode_timeout_seconds,
        max_observation_bytes=config.actor.max_observation_bytes,
    )

"""What one trajectory says while it is played, and the rows that an episode becomes in the end."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tunix_core.actor.episodes import Episode, EpisodeSpec, Identity
from tunix_core.actor.policy_engine import Conversation
from tunix_core.environments import StepResult, ToolCall, split_of
from tunix_core.types import Trajectory, Turn


class End(NamedTuple):
    """How an episode ended."""

    reward: float
    components: Mapping[str, float]
    finish_reason: str


class Recording:
    """The turns of one trajectory; they tile its tokens.

    Args:
        text: what the policy reads first, for people.
        num_tokens: of it.
        calls: that it answers, where it begins with a fork.
    """

    def __init__(self, text: str, num_tokens: int, seconds: float, calls: Sequence[ToolCall] = ()) -> None:
        self._turns: list[Turn] = []
        self._messages: list[dict[str, str]] = []
        self._generation_seconds = 0.0
        self._environment_seconds = seconds
        self._conversation: Conversation | None = None
        self._said: tuple[Turn, str] = (_turn("prompt", 0, num_tokens, seconds, calls), text)

    def policy(self, start: int, end: int, text: str, seconds: float, result: StepResult | None) -> None:
        """Note a policy message and, unless there was no step after it, what it was paid."""
        turn, said = self._said
        reward = 0.0 if result is None else result.reward
        self._turns += [turn, Turn(role="policy", start=start, end=end, reward=reward, seconds=seconds)]
        self._messages += [{"role": turn.role, "content": said}, {"role": "policy", "content": text}]
        self._generation_seconds += seconds

    def waited(self, seconds: float) -> None:
        """Note time that a step took."""
        self._environment_seconds += seconds

    def tool(self, num_tokens: int, result: StepResult, seconds: float) -> None:
        """Note what the environment answered; it is part of the trajectory once the policy has spoken again."""
        start = self._turns[-1].end
        self._said = _turn("tool", start, start + num_tokens, seconds, result.tool_calls), result.text

    def close(self, conversation: Conversation) -> None:
        """Take the tokens; nothing follows."""
        self._conversation = conversation

    def trajectory(self, spec: EpisodeSpec, identity: Identity, fork_index: int, end: End) -> Trajectory:
        assert self._conversation is not None, "trajectory before close"
        return Trajectory(
            trajectory_id=f"{spec.episode_id}-{fork_index}",
            episode_id=spec.episode_id,
            fork_index=fork_index,
            group_id=spec.group_id,
            group_size=spec.group_size,
            task_id=spec.task_id,
            environment=identity.environment,
            task_seed=spec.task_seed,
            split=split_of(spec.task_seed),
            actor_id=identity.actor_id,
            incarnation=identity.incarnation,
            created_at=time.time(),
            tokens=self._conversation.tokens,
            loss_mask=self._conversation.loss_mask,
            behavior_logprobs=self._conversation.logprobs,
            token_policy_version=self._conversation.versions,
            temperature=identity.temperature,
            turns=tuple(self._turns),
            reward=end.reward,
            reward_components=end.components,
            finish_reason=end.finish_reason,
            generation_seconds=self._generation_seconds,
            environment_seconds=self._environment_seconds,
            messages=json.dumps(self._messages, ensure_ascii=False),
        )


def _turn(role: str, start: int, end: int, seconds: float, calls: Sequence[ToolCall]) -> Turn:
    names, ok = ",".join(call.name for call in calls), all(call.ok for call in calls)
    return Turn(role=role, start=start, end=end, tool_name=names, tool_ok=ok, seconds=seconds)


def rows(recordings: Sequence[Recording], spec: EpisodeSpec, identity: Identity, end: End) -> Episode:
    """The episode's trajectories. The reward is the whole episode's in each; a turn's is in the one that holds it."""
    return [recording.trajectory(spec, identity, fork, end) for fork, recording in enumerate(recordings)]

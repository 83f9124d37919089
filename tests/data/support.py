"""Trajectories to order."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from tunix_core.data.rows import Rows, from_trajectories
from tunix_core.types import Trajectory, Turn


def make_trajectory(
    trajectory_id: str,
    *,
    group_id: str | None = None,
    episode_id: str | None = None,
    version: int = 0,
    length: int = 12,
    num_prompt_tokens: int = 4,
    reward: float = 0.0,
    group_size: int = 2,
    vocab_size: int = 64,
    incarnation: str = "a0",
    temperature: float = 1.0,
    content: int = 0,
    fork_index: int = 0,
) -> Trajectory:
    """Token ids follow from the id and `content`; all tokens after the prompt are the policy's."""
    digest = hashlib.sha256(f"{trajectory_id}/{content}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    prompt = min(num_prompt_tokens, length)
    loss_mask = np.arange(length) >= prompt
    return Trajectory(
        trajectory_id=trajectory_id,
        episode_id=trajectory_id if episode_id is None else episode_id,
        group_id=group_id if group_id is not None else trajectory_id.split("/")[0],
        group_size=group_size,
        task_id="task",
        environment="lookup",
        task_seed=0,
        split="train",
        actor_id="actor",
        incarnation=incarnation,
        created_at=1.0,
        tokens=rng.integers(0, vocab_size, length).astype(np.int32),
        loss_mask=loss_mask,
        behavior_logprobs=np.where(loss_mask, -rng.uniform(0.5, 4.0, length), 0).astype(np.float32),
        token_policy_version=np.where(loss_mask, version, -1).astype(np.int32),
        temperature=temperature,
        turns=[Turn(role="prompt", start=0, end=prompt), Turn(role="policy", start=prompt, end=length)],
        reward=reward,
        reward_components={"answer": reward},
        finish_reason="completed",
        generation_seconds=0.1,
        environment_seconds=0.2,
        messages="[]",
        fork_index=fork_index,
    )


def with_two_turns(trajectory: Trajectory, *rewards: float) -> Trajectory:
    """Its third token after the prompt becomes a tool's, between two turns of the policy that were paid so."""
    (_, own) = trajectory.turns
    middle = own.start + 2
    spoken = trajectory.loss_mask & (np.arange(trajectory.num_tokens) != middle)
    turns = [
        trajectory.turns[0],
        Turn(role="policy", start=own.start, end=middle, reward=rewards[0]),
        Turn(role="tool", start=middle, end=middle + 1),
        Turn(role="policy", start=middle + 1, end=own.end, reward=rewards[1]),
    ]
    return dataclasses.replace(
        trajectory,
        turns=turns,
        reward=sum(rewards),
        loss_mask=spoken,
        behavior_logprobs=np.where(spoken, trajectory.behavior_logprobs, 0),
        token_policy_version=np.where(spoken, trajectory.token_policy_version, -1),
    )


def make_group(
    group_id: str, *, size: int = 2, version: int = 0, lengths: Sequence[int] = (12, 9, 15, 7), **kwargs
) -> list[Trajectory]:
    """Rewards alternate 0, 1, so that a group has a signal."""
    return [
        make_trajectory(
            f"{group_id}/{i}",
            version=version,
            length=lengths[i % len(lengths)],
            reward=float(i % 2),
            group_size=size,
            **kwargs,
        )
        for i in range(size)
    ]


def make_rows(shard: str, trajectories: Sequence[Trajectory], **kwargs) -> Rows:
    incarnation = trajectories[0].incarnation if trajectories else "a0"
    return from_trajectories(shard, trajectories, incarnation=incarnation, **kwargs)


def centered(rows: Rows, members: np.ndarray) -> np.ndarray:
    """A plain baseline: what the buffer does with advantages does not depend on their formula."""
    rewards = rows.rewards[members]
    return rewards - rewards.mean()

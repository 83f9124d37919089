"""Trajectories for tests: small, valid, different from each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from tunix_core.types import Trajectory, Turn


def make_trajectory(index: int = 0, *, num_tokens: int = 12, group_size: int = 4, **changes: Any) -> Trajectory:
    """Trajectory `index`, member `index % group_size` of its group; `changes` replace fields."""
    rng = np.random.default_rng(index)
    mask = rng.random(num_tokens) < 0.5
    mask[-1] = True
    first, second = num_tokens // 4, num_tokens // 2
    group, member = divmod(index, max(1, group_size))
    values: dict[str, Any] = {
        "trajectory_id": f"{index:08d}-é",
        "episode_id": f"episode-{index}",
        "group_id": f"00000000-{group:08d}",
        "group_size": group_size,
        "task_id": f"lookup-{group}",
        "environment": "lookup",
        "task_seed": 2**40 + group,
        "split": "train",
        "actor_id": "actor_0_0",
        "incarnation": "inc0",
        "created_at": 1_800_000_000.25 + index,
        "tokens": rng.integers(0, 272, num_tokens).astype(np.int32),
        "loss_mask": mask,
        "behavior_logprobs": np.where(mask, -rng.exponential(0.4, num_tokens), 0).astype(np.float32),
        "token_policy_version": np.where(mask, rng.integers(3, 6, num_tokens), -1).astype(np.int32),
        "temperature": 0.7,
        "turns": [
            Turn(role="prompt", start=0, end=first),
            Turn(role="policy", start=first, end=second, seconds=0.25),
            Turn(role="tool", start=second, end=num_tokens, reward=0.5, tool_name="search", tool_ok=member % 2 == 0),
        ],
        "reward": 0.1 * index,
        "reward_components": {"correct": 0.1 * index, "format": 1.0} if index % 2 else {},
        "finish_reason": "completed",
        "generation_seconds": 0.5,
        "environment_seconds": 1.5,
        "messages": '[{"role": "user", "content": "…"}]',
    }
    return Trajectory(**{**values, **changes})


def make_group(group: int, *, group_size: int = 4, **changes: Any) -> list[Trajectory]:
    """The members of one group."""
    first = group * group_size
    return [make_trajectory(first + member, group_size=group_size, **changes) for member in range(group_size)]


def same_trajectory(a: Trajectory, b: Trajectory) -> bool:
    """Equal in every field, arrays included (types too)."""
    for field in Trajectory.__dataclass_fields__:
        left, right = getattr(a, field), getattr(b, field)
        if isinstance(left, np.ndarray):
            if left.dtype != right.dtype or not np.array_equal(left, right, equal_nan=left.dtype.kind == "f"):
                return False
        elif isinstance(left, list | tuple):
            if list(left) != list(right):
                return False
        elif left != right:
            return False
    return True

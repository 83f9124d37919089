"""Trajectories in columns, as the buffer takes them: one shard's rows, concatenated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from tunix_core.types import RowRef, Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """R trajectories of one shard with T tokens in all."""

    shard: str
    index: np.ndarray  # int64 [R] row number within the shard
    trajectory_ids: Sequence[str]  # [R]
    episode_ids: Sequence[str]  # [R]
    group_ids: Sequence[str]  # [R]
    group_sizes: np.ndarray  # int64 [R]
    content_hashes: Sequence[str]  # [R]
    offsets: np.ndarray  # int64 [R + 1]
    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    behavior_logprobs: np.ndarray  # float32 [T]
    version_min: np.ndarray  # int64 [R] oldest policy version among the policy tokens, -1 without any
    version_max: np.ndarray  # int64 [R]
    temperature: np.ndarray  # float32 [R]
    rewards: np.ndarray  # float32 [R]
    successes: np.ndarray  # float32 [R] 1 where the task was solved
    faults: Mapping[int, str]
    """Row number within the shard -> why the row must not be trained on."""

    @property
    def lengths(self) -> np.ndarray:
        """[R] tokens of each row."""
        return np.diff(self.offsets)

    def refs(self) -> list[RowRef]:
        return [RowRef(shard=self.shard, row=int(row)) for row in self.index]

    def take(self, rows: np.ndarray) -> Rows:
        """The given rows (positions, not row numbers), copied, so that the shard's memory can go."""
        lengths = self.lengths[rows]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        source = np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths) + np.arange(offsets[-1])
        chosen = rows.tolist()
        return Rows(
            shard=self.shard,
            index=self.index[rows],
            trajectory_ids=[self.trajectory_ids[i] for i in chosen],
            episode_ids=[self.episode_ids[i] for i in chosen],
            group_ids=[self.group_ids[i] for i in chosen],
            group_sizes=self.group_sizes[rows],
            content_hashes=[self.content_hashes[i] for i in chosen],
            offsets=offsets,
            tokens=self.tokens[source],
            loss_mask=self.loss_mask[source],
            behavior_logprobs=self.behavior_logprobs[source],
            version_min=self.version_min[rows],
            version_max=self.version_max[rows],
            temperature=self.temperature[rows],
            rewards=self.rewards[rows],
            successes=self.successes[rows],
            faults={row: why for row, why in self.faults.items() if row in set(self.index[rows].tolist())},
        )

    @property
    def num_bytes(self) -> int:
        """Memory that the arrays hold."""
        return sum(
            value.nbytes
            for value in (getattr(self, f.name) for f in dataclasses.fields(self))
            if isinstance(value, np.ndarray)
        )


def rows_of(
    shard: str,
    trajectories: Sequence[Trajectory],
    content_hashes: Sequence[str],
    *,
    index: Sequence[int] | None = None,
    faults: Mapping[int, str] | None = None,
) -> Rows:
    """From single trajectories: for rows fetched one by one, and for tests. Not for the hot path."""
    lengths = np.array([t.num_tokens for t in trajectories], np.int64)

    def joined(name: str, dtype: type) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *(np.asarray(getattr(t, name), dtype) for t in trajectories)])

    return Rows(
        shard=shard,
        index=np.arange(len(trajectories)) if index is None else np.asarray(index, np.int64),
        trajectory_ids=[t.trajectory_id for t in trajectories],
        episode_ids=[t.episode_id for t in trajectories],
        group_ids=[t.group_id for t in trajectories],
        group_sizes=np.array([t.group_size for t in trajectories], np.int64),
        content_hashes=list(content_hashes),
        offsets=np.r_[0, np.cumsum(lengths)].astype(np.int64),
        tokens=joined("tokens", np.int32),
        loss_mask=joined("loss_mask", np.bool_),
        behavior_logprobs=joined("behavior_logprobs", np.float32),
        version_min=np.array([t.policy_version_min for t in trajectories], np.int64),
        version_max=np.array([t.policy_version_max for t in trajectories], np.int64),
        temperature=np.array([t.temperature for t in trajectories], np.float32),
        rewards=np.array([t.reward for t in trajectories], np.float32),
        successes=np.array([success_of(t) for t in trajectories], np.float32),
        faults=dict(faults or {}),
    )


def success_of(trajectory: Trajectory) -> float:
    """1 where the task was solved: the `answer` component where the environment names one, else a full reward."""
    return float(trajectory.reward_components.get("answer", trajectory.reward) >= 1.0)

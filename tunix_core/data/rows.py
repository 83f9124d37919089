"""Trajectories in columns, as the buffer takes them: one shard's rows, concatenated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from tunix_core import paths
from tunix_core.data import turns
from tunix_core.data.turns import PolicyTurns
from tunix_core.storage.shard_archive import RowReader
from tunix_core.storage.shards import ShardRows, content_hash
from tunix_core.storage.store import ObjectStore
from tunix_core.types import RowRef, Trajectory

SUCCESS_COMPONENT = "answer"
"""The reward component that says whether the task was solved, where an environment gives one."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """R trajectories of one shard with T tokens in all."""

    shard: str
    incarnation: str
    """Of the actor that wrote the shard."""
    index: np.ndarray  # int64 [R] row number within the shard
    trajectory_ids: Sequence[str]  # [R]
    episode_ids: Sequence[str]  # [R]
    forks: np.ndarray  # int64 [R] place among the trajectories of its episode
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
    turns: PolicyTurns | None = None
    """None where nobody asked for them."""

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
            incarnation=self.incarnation,
            index=self.index[rows],
            trajectory_ids=[self.trajectory_ids[i] for i in chosen],
            episode_ids=[self.episode_ids[i] for i in chosen],
            forks=self.forks[rows],
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
            turns=None if self.turns is None else self.turns.take(rows),
        )

    @property
    def num_bytes(self) -> int:
        """Memory that the arrays hold."""
        arrays = sum(
            value.nbytes
            for value in (getattr(self, f.name) for f in dataclasses.fields(self))
            if isinstance(value, np.ndarray)
        )
        return arrays + (0 if self.turns is None else self.turns.num_bytes)


def from_shard(shard: str, rows: ShardRows, *, incarnation: str, with_turns: bool = False) -> Rows:
    """The columns of a decoded shard; views where every row is sound.

    Args:
        with_turns: read the policy's turns too; a row whose turns cannot be trained on is a fault then.
    """
    offsets, tokens = rows.ragged("tokens")
    loss_mask, faults, found = _aligned(rows, "loss_mask", offsets), rows.faults, None
    if with_turns:
        found = turns.of_shard(rows)
        faults = turns.find_faults(found, loss_mask, offsets) | faults
    answers, rewards = rows.component(SUCCESS_COMPONENT), rows.column("reward")
    with np.errstate(over="ignore"):  # such rows are faults
        narrow = {name: rows.column(name).astype(np.float32) for name in ("reward", "temperature")}
    return Rows(
        shard=shard,
        incarnation=incarnation,
        index=np.arange(rows.num_rows),
        trajectory_ids=rows.column("trajectory_id").tolist(),
        episode_ids=rows.column("episode_id").tolist(),
        forks=rows.column("fork_index").astype(np.int64),
        group_ids=rows.column("group_id").tolist(),
        group_sizes=rows.column("group_size").astype(np.int64),
        content_hashes=rows.column("content_hash").tolist(),
        offsets=offsets.astype(np.int64),
        tokens=tokens,
        loss_mask=loss_mask,
        behavior_logprobs=_aligned(rows, "behavior_logprobs", offsets),
        version_min=rows.column("policy_version_min").astype(np.int64),
        version_max=rows.column("policy_version_max").astype(np.int64),
        temperature=narrow["temperature"],
        rewards=narrow["reward"],
        successes=(np.where(np.isnan(answers), rewards, answers) >= 1.0).astype(np.float32),
        faults=faults,
        turns=found,
    )


def _aligned(rows: ShardRows, name: str, offsets: np.ndarray) -> np.ndarray:
    """A per-token column by the offsets of the tokens; rows of another length are faults and become zeros."""
    own, values = rows.ragged(name)
    if np.array_equal(own, offsets):
        return values
    aligned = np.zeros(int(offsets[-1]), values.dtype)
    for row in np.flatnonzero(np.diff(own) == np.diff(offsets)):
        aligned[offsets[row] : offsets[row + 1]] = values[own[row] : own[row + 1]]
    return aligned


def from_trajectories(
    shard: str,
    trajectories: Sequence[Trajectory],
    *,
    incarnation: str,
    index: Sequence[int] | None = None,
    faults: Mapping[int, str] | None = None,
) -> Rows:
    """From single trajectories of one shard: rows that a recovery fetched by reference. Not for the hot path.

    Args:
        index: their row numbers; 0, 1, 2, … where not given.
    """
    lengths = np.array([t.num_tokens for t in trajectories], np.int64)

    def joined(name: str, dtype: type) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *(np.asarray(getattr(t, name), dtype) for t in trajectories)])

    return Rows(
        shard=shard,
        incarnation=incarnation,
        index=np.arange(len(trajectories)) if index is None else np.asarray(index, np.int64),
        trajectory_ids=[t.trajectory_id for t in trajectories],
        episode_ids=[t.episode_id for t in trajectories],
        forks=np.array([t.fork_index for t in trajectories], np.int64),
        group_ids=[t.group_id for t in trajectories],
        group_sizes=np.array([t.group_size for t in trajectories], np.int64),
        content_hashes=[
            content_hash(t.tokens, t.loss_mask, t.behavior_logprobs, t.token_policy_version, t.reward)
            for t in trajectories
        ],
        offsets=np.r_[0, np.cumsum(lengths)].astype(np.int64),
        tokens=joined("tokens", np.int32),
        loss_mask=joined("loss_mask", np.bool_),
        behavior_logprobs=joined("behavior_logprobs", np.float32),
        version_min=np.array([t.policy_version_min for t in trajectories], np.int64),
        version_max=np.array([t.policy_version_max for t in trajectories], np.int64),
        temperature=np.array([t.temperature for t in trajectories], np.float32),
        rewards=np.array([t.reward for t in trajectories], np.float32),
        successes=np.array([_is_success(t) for t in trajectories], np.float32),
        faults=dict(faults or {}),
        turns=turns.of_trajectories(trajectories),
    )


def _is_success(trajectory: Trajectory) -> bool:
    return trajectory.reward_components.get(SUCCESS_COMPONENT, trajectory.reward) >= 1.0


class RowFetcher:
    """Rows of one shard by reference, in columns."""

    def __init__(self, store: ObjectStore) -> None:
        self._reader = RowReader(store)

    def __call__(self, refs: Sequence[RowRef]) -> Rows:
        """Raises ObjectMissing or CorruptObject when they cannot be used."""
        shard = refs[0].shard
        incarnation = paths.parse_shard(shard).incarnation
        return from_trajectories(
            shard, self._reader.read(refs), incarnation=incarnation, index=[ref.row for ref in refs]
        )

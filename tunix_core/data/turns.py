"""The policy's turns and what each was paid, in columns; read only where the algorithm asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tunix_core.storage.shards import ShardRows
from tunix_core.types import Trajectory

_ROLE = "policy"


class PolicyTurns(NamedTuple):
    """The policy turns of R trajectories, K in all, in order; token indices count within a trajectory."""

    offsets: np.ndarray  # int64 [R + 1]
    start: np.ndarray  # int32 [K]
    end: np.ndarray  # int32 [K]
    rewards: np.ndarray  # float32 [K]

    @property
    def row(self) -> np.ndarray:
        """int64 [K]: whose turn it is."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    @property
    def number(self) -> np.ndarray:
        """int64 [K]: 0, 1, … within the trajectory."""
        return np.arange(self.offsets[-1]) - self.offsets[self.row]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self)

    def take(self, rows: np.ndarray) -> PolicyTurns:
        """Of the given rows, copied."""
        counts = np.diff(self.offsets)[rows]
        offsets = np.r_[0, np.cumsum(counts)].astype(np.int64)
        source = np.repeat(self.offsets[:-1][rows] - offsets[:-1], counts) + np.arange(offsets[-1])
        return PolicyTurns(offsets, self.start[source], self.end[source], self.rewards[source])


def of_shard(rows: ShardRows) -> PolicyTurns:
    """Of a decoded shard; of a faulty row anything."""
    offsets, roles = rows.turn_column("role")
    chosen = np.asarray(roles == _ROLE, bool)
    start, end, rewards = (rows.turn_column(name)[1][chosen] for name in ("start", "end", "reward"))
    kept = np.r_[0, np.cumsum(chosen)][offsets]
    inside = slice(kept[0], kept[-1])
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes a fault
        paid = rewards[inside].astype(np.float32)
    return PolicyTurns(
        (kept - kept[0]).astype(np.int64), start[inside].astype(np.int32), end[inside].astype(np.int32), paid
    )


def of_trajectories(trajectories: Sequence[Trajectory]) -> PolicyTurns:
    own = [[turn for turn in trajectory.turns if turn.role == _ROLE] for trajectory in trajectories]
    turns = [turn for each in own for turn in each]
    return PolicyTurns(
        np.r_[0, np.cumsum([len(each) for each in own])].astype(np.int64),
        np.array([turn.start for turn in turns], np.int32),
        np.array([turn.end for turn in turns], np.int32),
        np.array([turn.reward for turn in turns], np.float32),
    )


def find_faults(turns: PolicyTurns, loss_mask: np.ndarray, token_offsets: np.ndarray) -> dict[int, str]:
    """Position of a row -> why its turns cannot be trained on.

    Args:
        loss_mask: bool [T], the rows' tokens one after another.
        token_offsets: [R + 1].
    """
    row, lengths = turns.row, np.diff(token_offsets)
    start, end = (np.clip(at, 0, lengths[row]) for at in (turns.start, turns.end))
    before = np.r_[0, np.cumsum(loss_mask)]
    num_spoken = before[token_offsets[row] + end] - before[token_offsets[row] + start]
    follows = np.r_[False, row[1:] == row[:-1]] if len(row) else np.zeros(0, bool)
    overlaps = follows & (start < np.r_[0, end[:-1]][: len(row)])
    of_rows = before[token_offsets[1:]] - before[token_offsets[:-1]]
    covered = np.bincount(row, num_spoken, minlength=len(lengths)) == of_rows
    faults = dict.fromkeys(
        [*np.flatnonzero(~covered).tolist(), *row[overlaps].tolist()],
        "turns: the policy's do not cover each policy token once",
    )
    silent = row[(num_spoken == 0) & (turns.rewards != 0)]
    faults |= dict.fromkeys(silent.tolist(), "turns.reward: of a policy turn without a policy token")
    return faults | dict.fromkeys(row[~np.isfinite(turns.rewards)].tolist(), "turns.reward: not finite")


def at_ends(turns: PolicyTurns, values: np.ndarray, loss_mask: np.ndarray, token_offsets: np.ndarray) -> np.ndarray:
    """float32 [T]: each turn's value at its last policy token, 0 elsewhere; turns without one have none to give.

    Args:
        values: [K].
        loss_mask: bool [T], the rows' tokens one after another.
        token_offsets: [R + 1].
    """
    out = np.zeros(len(loss_mask), np.float32)
    latest = np.maximum.accumulate(np.r_[-1, np.where(loss_mask, np.arange(len(loss_mask)), -1)])
    begins = token_offsets[turns.row] + turns.start
    last = latest[token_offsets[turns.row] + turns.end]
    speaks = last >= begins
    out[last[speaks]] = values[speaks]
    return out


def spread(turns: PolicyTurns, values: np.ndarray, token_offsets: np.ndarray) -> np.ndarray:
    """float32 [T]: each turn's value at all its tokens, 0 elsewhere.

    Args:
        values: [K].
        token_offsets: [R + 1].
    """
    out = np.zeros(int(token_offsets[-1]), np.float32)
    lengths = turns.end - turns.start
    begins = token_offsets[turns.row] + turns.start
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    out[np.repeat(begins, lengths) + within] = np.repeat(values, lengths)
    return out

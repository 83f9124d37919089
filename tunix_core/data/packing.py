"""Trajectories into windows of W tokens: best fit, longest first, deterministic.

Segment ids count from 1 in each window (0 is padding) and positions restart in each segment, so
attention that respects segments sees every trajectory as if it stood alone.

How many windows a batch needs varies; a batch is padded to whole micro-batches on every data shard.
The largest one that is compiled for covers the worst case of a whole batch, every trajectory at
`actor.context_tokens`: the batch is fixed, so it is never cut and never shrinks because its
trajectories got longer. Only shards written with a longer context than this run's can need more than
that; then `fit_groups` says how many whole groups fit, and the caller puts the rest back.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tunix_core.config import RunConfig


class Layout(NamedTuple):
    """Where each of N trajectories lies."""

    window: np.ndarray  # int32 [N]
    start: np.ndarray  # int32 [N] first token within the window
    num_windows: int
    """Windows that hold anything."""


def best_fit(lengths: np.ndarray, window_tokens: int) -> Layout:
    """Best-fit decreasing: each trajectory goes to the fullest window that still takes it.

    Ties go to the earlier trajectory and the earlier window, so equal lengths give an equal layout.

    Args:
        lengths: [N] tokens, each from 1 to `window_tokens`.
        window_tokens: W.
    """
    lengths = np.asarray(lengths, np.int64)
    assert lengths.size == 0 or (lengths.min() >= 1 and lengths.max() <= window_tokens), "1 <= length <= W"
    window = np.zeros(len(lengths), np.int32)
    start = np.zeros(len(lengths), np.int32)
    # Windows with free room, sorted by (room, window): the first entry with enough room is the
    # best fit. N log N comparisons; the insertions shift short lists in C.
    rooms: list[tuple[int, int]] = []
    num_windows = 0
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        at = bisect.bisect_left(rooms, (length, -1))
        if at == len(rooms):
            room, chosen = window_tokens, num_windows
            num_windows += 1
        else:
            room, chosen = rooms.pop(at)
        window[i], start[i] = chosen, window_tokens - room
        if room > length:
            bisect.insort(rooms, (room - length, chosen))
    return Layout(window, start, num_windows)


def window_counts(config: RunConfig) -> tuple[int, ...]:
    """The window counts that a batch is padded to, rising: multiples of a micro-batch on every data shard.

    The last one covers the worst case of a whole batch, every trajectory at `actor.context_tokens`.
    """
    return tuple(config.microbatch_windows * (i + 1) for i in range(config.max_microbatches))


def fit_groups(group_lengths: Sequence[np.ndarray], window_tokens: int, max_windows: int) -> int:
    """How many of the leading groups fit into `max_windows` windows; at least 1 given G windows."""
    for num_groups in range(len(group_lengths), 0, -1):
        if best_fit(np.concatenate(group_lengths[:num_groups]), window_tokens).num_windows <= max_windows:
            return num_groups
    return 0


class PackedArrays(NamedTuple):
    """What a train step reads, for N windows of W tokens; entry t describes token t itself."""

    tokens: np.ndarray  # int32 [N, W]
    positions: np.ndarray  # int32 [N, W]
    segment_ids: np.ndarray  # int32 [N, W]
    loss_mask: np.ndarray  # bool [N, W] policy tokens that have a token before them to be predicted from
    behavior_logprobs: np.ndarray  # float32 [N, W]
    advantages: np.ndarray  # float32 [N, W]
    temperature: np.ndarray  # float32 [N, W]
    rewards: np.ndarray | None = None  # float32 [N, W], where a value head learns from them


def pack(
    layout: Layout,
    lengths: np.ndarray,
    *,
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    behavior_logprobs: np.ndarray,
    advantages: np.ndarray,
    temperature: np.ndarray,
    rewards: np.ndarray | None = None,
    num_windows: int,
    window_tokens: int,
) -> PackedArrays:
    """Scatter concatenated trajectories to their places; the rest is padding (segment 0, temperature 1).

    Args:
        layout: of N trajectories.
        lengths: [N].
        tokens, loss_mask, behavior_logprobs: [sum of lengths], the trajectories one after another.
        advantages: [N], or [sum of lengths] where they differ within a trajectory.
        temperature: [N].
        rewards: [sum of lengths], or None.
        num_windows: of the arrays, at least `layout.num_windows`.
        window_tokens: W.
    """
    lengths = np.asarray(lengths, np.int64)
    assert layout.num_windows <= num_windows, "more windows than compiled"
    offsets = np.cumsum(lengths) - lengths
    within = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(offsets, lengths)
    first = layout.window.astype(np.int64) * window_tokens + layout.start
    place = np.repeat(first, lengths) + within
    # The segment id of a trajectory is its rank by start within its window.
    order = np.lexsort((layout.start, layout.window))
    rank = np.empty(len(lengths), np.int32)
    is_first = np.r_[True, np.diff(layout.window[order]) != 0] if len(order) else np.zeros(0, bool)
    starts = np.flatnonzero(is_first)
    rank[order] = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)])) + 1

    def scatter(values: np.ndarray, dtype: type, fill: float = 0) -> np.ndarray:
        out: np.ndarray = np.full(num_windows * window_tokens, fill, dtype)
        out[place] = values
        return out.reshape(num_windows, window_tokens)

    return PackedArrays(
        tokens=scatter(tokens, np.int32),
        positions=scatter(within, np.int32),
        segment_ids=scatter(np.repeat(rank, lengths), np.int32),
        loss_mask=scatter(loss_mask & (within > 0), np.bool_),
        behavior_logprobs=scatter(behavior_logprobs, np.float32),
        advantages=scatter(
            advantages if len(advantages) == len(within) else np.repeat(advantages, lengths), np.float32
        ),
        temperature=scatter(np.repeat(temperature, lengths), np.float32, 1.0),
        rewards=None if rewards is None else scatter(rewards, np.float32),
    )

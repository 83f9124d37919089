"""Trajectories into windows of W tokens: best fit, longest first, deterministic.

Segment ids count from 1 in each window (0 is padding) and positions restart in each segment, so
attention that respects segments sees every trajectory as if it stood alone.

How many windows a batch needs varies; a batch is padded to whole micro-batches on every data shard.
The largest one that is compiled for covers the worst case of a whole batch (`WindowSize`): the batch is fixed, so it
is never cut and never shrinks because its trajectories got longer. Only shards written with a longer context than this
run's can need more than that; then `fit_groups` says how many whole groups fit, and the caller puts the rest back.
"""

from __future__ import annotations

import bisect
import zlib
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


class WindowSize(NamedTuple):
    """What batches of one size of windows are padded to."""

    tokens: int
    """W"""
    counts: tuple[int, ...]
    """Rising: multiples of a micro-batch on every data shard. The last one, which is compiled, covers the worst case of a
    whole batch, every trajectory as long as a window or an actor's context."""


def window_sizes(config: RunConfig) -> tuple[WindowSize, ...]:
    """Rising."""
    unit = config.microbatch_windows
    return tuple(
        WindowSize(tokens, tuple(unit * (i + 1) for i in range(config.max_microbatches(tokens))))
        for tokens in config.window_sizes
    )


def size_for(sizes: Sequence[WindowSize], longest: int) -> WindowSize:
    """The smallest that holds a trajectory of so many tokens."""
    return next(size for size in sizes if size.tokens >= longest)


def fit_groups(group_lengths: Sequence[np.ndarray], window_tokens: int, max_windows: int) -> int:
    """How many of the leading groups fit into `max_windows` windows; at least 1 given G windows."""
    for num_groups in range(len(group_lengths), 0, -1):
        if best_fit(np.concatenate(group_lengths[:num_groups]), window_tokens).num_windows <= max_windows:
            return num_groups
    return 0


NUM_SAMPLERS = 8
"""Actors are told apart by a number from 1 to this; see `sampler_number`."""


def sampler_number(actor_id: str) -> int:
    """Of an actor, the same on all hosts without talking; two may share one."""
    return zlib.crc32(actor_id.encode()) % NUM_SAMPLERS + 1


class PackedArrays(NamedTuple):
    """What a train step reads, for N windows of W tokens; entry t describes token t itself."""

    tokens: np.ndarray  # int32 [N, W]
    positions: np.ndarray  # int32 [N, W]
    segment_ids: np.ndarray  # int32 [N, W]
    loss_mask: np.ndarray  # bool [N, W] policy tokens that have a token before them to be predicted from
    behavior_logprobs: np.ndarray  # float32 [N, W]
    advantages: np.ndarray  # float32 [N, W]
    temperature: np.ndarray  # float32 [N, W]
    equal_version: np.ndarray
    """uint8 [N, W]: the number of the actor whose policy token was sampled with the very weights that the step starts from;
    0 of all others."""
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
    equal_version: np.ndarray | None = None,
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
        equal_version: uint8 [N], not 0 for trajectories whose every policy token has the clock's own version; None: not
            known of any.
        rewards: [sum of lengths], or None.
        num_windows: of the arrays, at least `layout.num_windows`.
        window_tokens: W.
    """
    lengths = np.asarray(lengths, np.int64)
    assert layout.num_windows <= num_windows, "more windows than compiled"
    first = layout.window.astype(np.int64) * window_tokens + layout.start
    order = np.argsort(first, kind="stable")
    # The windows laid end to end are pieces in order: gap, trajectory, gap, …, gap. So a value per trajectory
    # is one `repeat` over the pieces and a value per token one `take`, with few large temporaries: the first
    # touch of fresh memory costs more here than the copying.
    size, num_pieces = num_windows * window_tokens, 2 * len(order) + 1
    pieces = np.zeros(num_pieces, np.int64)
    pieces[1::2] = lengths[order]
    pieces[0::2] = np.r_[first[order], size] - np.r_[0, (first + lengths)[order]]
    assert pieces.min() >= 0, "trajectories overlap"
    ends = np.cumsum(pieces)
    gaps = [(end - room, end) for end, room in zip(ends[0::2].tolist(), pieces[0::2].tolist(), strict=True) if room]

    def spread(values: np.ndarray, dtype: type, fill: float = 0) -> np.ndarray:
        of_pieces: np.ndarray = np.full(num_pieces, fill, dtype)
        of_pieces[1::2] = values[order]
        return np.repeat(of_pieces, pieces)

    def blank(array: np.ndarray) -> np.ndarray:
        for begin, end in gaps:
            array[begin:end] = 0
        return array

    source = np.arange(size, dtype=np.int64)
    source += spread(np.cumsum(lengths) - lengths - first, np.int64)

    def gather(values: np.ndarray, dtype: type) -> np.ndarray:
        if not len(values):
            return np.zeros(size, dtype)
        return blank(np.take(values.astype(dtype, copy=False), source, mode="clip"))

    positions = np.arange(size, dtype=np.int32)
    positions -= spread(first, np.int32)
    mask = gather(loss_mask, np.bool_)
    mask[first] = False
    same = np.zeros(len(lengths), np.uint8) if equal_version is None else equal_version
    flat = PackedArrays(
        tokens=gather(tokens, np.int32),
        positions=blank(positions),
        segment_ids=spread(_rank_in_window(layout), np.int32),
        loss_mask=mask,
        behavior_logprobs=gather(behavior_logprobs, np.float32),
        # Of as many tokens as trajectories, each trajectory has one: both readings agree.
        advantages=(gather if len(advantages) == len(tokens) else spread)(advantages, np.float32),
        temperature=spread(temperature, np.float32, 1.0),
        equal_version=mask * spread(same, np.uint8),
        rewards=None if rewards is None else gather(rewards, np.float32),
    )
    shape = num_windows, window_tokens
    return PackedArrays(**{name: array.reshape(shape) for name, array in flat._asdict().items() if array is not None})


def _rank_in_window(layout: Layout) -> np.ndarray:
    """int32 [N]: a trajectory's segment id, its rank by start within its window, from 1."""
    order = np.lexsort((layout.start, layout.window))
    rank = np.empty(len(order), np.int32)
    is_first = np.r_[True, np.diff(layout.window[order]) != 0] if len(order) else np.zeros(0, bool)
    starts = np.flatnonzero(is_first)
    rank[order] = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)])) + 1
    return rank

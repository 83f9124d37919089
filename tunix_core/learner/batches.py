"""A batch on the host, and its step record: what makes a step repeatable to the bit.

The record names the rows in order, their advantages (which were computed over whole groups, of which
an overlong member may be missing here), the window layout, the denominator and the seed. Executing it
again needs nothing but the shards.

With several hosts each packs the windows that its devices hold, and the figures of all are added up (`Figures`); the
record is of the whole batch, so any number of hosts can execute it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tunix_core import paths
from tunix_core.config import RunConfig
from tunix_core.data.buffer import FetchRows, group_state
from tunix_core.data.groups import Group, trajectory_staleness
from tunix_core.data.packing import (
    Layout,
    PackedArrays,
    WindowSize,
    best_fit,
    pack,
    sampler_number,
    size_for,
    window_sizes,
)
from tunix_core.distributed.hosts import Share, whole_share
from tunix_core.errors import ConfigError, CorruptObject
from tunix_core.learner.credit import batch_advantages, episode_advantages, token_rewards
from tunix_core.rl.advantages import mean_and_deviation
from tunix_core.rl.aggregation import denominator
from tunix_core.types import RowRef


class Figures(NamedTuple):
    """What must be known of a whole batch; those of several hosts add up."""

    counts: np.ndarray  # int64 [K, 2] policy tokens, and trajectories that have any, of each update
    lengths: np.ndarray  # int64 [trajectories] tokens
    staleness: np.ndarray  # int64 [trajectories with policy tokens]
    rewards: np.ndarray  # float32 [trajectories]
    successes: np.ndarray  # float32 [trajectories]
    num_groups: int

    def to_json(self) -> list[Any]:
        return [np.asarray(value).tolist() for value in self]

    @classmethod
    def total(cls, parts: Sequence[Sequence[Any]]) -> Figures:
        """From `to_json` of each host, in host order."""
        counts, lengths, staleness, rewards, successes, num_groups = zip(*parts, strict=True)
        return cls(
            counts=np.sum([np.array(c, np.int64) for c in counts], axis=0),
            lengths=np.concatenate([np.array(part, np.int64) for part in lengths]),
            staleness=np.concatenate([np.array(part, np.int64) for part in staleness]),
            rewards=np.concatenate([np.array(part, np.float32) for part in rewards]),
            successes=np.concatenate([np.array(part, np.float32) for part in successes]),
            num_groups=sum(num_groups),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HostBatch:
    """Packed and ready for the device; N windows of W tokens, of which the arrays have this host's."""

    clock: int
    """Of the consuming step, before it."""
    groups: Sequence[Group]
    """This host's."""
    layout: Layout
    """Of their trajectories, among all windows of the batch."""
    arrays: PackedArrays
    num_windows: int
    """N, over all hosts."""
    figures: Figures
    """This host's until `completed`."""
    config: RunConfig
    statistics: tuple[float, float] | None = None
    """Of the whole batch's advantages, where they are normalised by them; None: computed from the groups, if at all."""

    @property
    def shape(self) -> tuple[int, int]:
        """N and W."""
        return self.num_windows, int(self.arrays.tokens.shape[1])

    @property
    def policy_tokens(self) -> int:
        return int(self.figures.counts[:, 0].sum())

    @property
    def num_tokens(self) -> int:
        return int(self.figures.lengths.sum())

    @property
    def denominator(self) -> np.ndarray:
        """float32 [K]: what the loss of each update divides its sum by, see `rl.aggregation`; 0 where it has no policy token."""
        algorithm = self.config.algorithm
        found = [
            denominator(
                algorithm.aggregation,
                num_policy_tokens=int(num_tokens),
                num_sequences=int(num_sequences),
                constant_tokens=algorithm.constant_tokens,
            )
            for num_tokens, num_sequences in self.figures.counts
        ]
        return np.array(found, np.float32)

    def completed(self, parts: Sequence[Sequence[Any]]) -> HostBatch:
        """With the figures of all hosts, see `Figures.to_json`."""
        return dataclasses.replace(self, figures=Figures.total(parts))


def share_of_one(config: RunConfig) -> Share:
    """All windows."""
    return whole_share(config.mesh.num_window_shards)


def longest(groups: Sequence[Group]) -> int:
    """Tokens of the longest trajectory; 0 of none."""
    return max((int(group.rows.lengths.max(initial=0)) for group in groups), default=0)


def lay_out(groups: Sequence[Group], window_tokens: int, share: Share) -> Layout:
    """Into this host's windows, by their numbers among all."""
    own = best_fit(np.concatenate([g.rows.lengths for g in groups]), window_tokens)
    window = share.global_windows(own.window)
    return Layout(window, own.start, int(window.max()) // share.num_shards * share.num_shards + share.num_shards)


def assemble(groups: Sequence[Group], clock: int, sizes: Sequence[WindowSize], config: RunConfig) -> HostBatch:
    """Pack groups into the smallest windows, and the smallest number of them, that hold them; alone.

    Args:
        sizes: rising; the last one holds the groups.
    """
    share, size = share_of_one(config), size_for(sizes, longest(groups))
    layout = lay_out(groups, size.tokens, share)
    return build(groups, clock, layout, (padded(layout.num_windows, size.counts), size.tokens), config, share)


def padded(num_windows: int, counts: Sequence[int]) -> int:
    """The smallest compiled number that holds so many."""
    return next(count for count in counts if count >= num_windows)


def build(
    groups: Sequence[Group],
    clock: int,
    layout: Layout,
    shape: tuple[int, int],
    config: RunConfig,
    share: Share,
    statistics: tuple[float, float] | None = None,
) -> HostBatch:
    """This host's windows of a batch.

    Args:
        shape: windows and tokens of each, of the whole batch.
        layout: of all trajectories of the groups; those in windows of other hosts are left out.
        statistics: see `HostBatch`.
    """
    num_windows, window_tokens = shape
    window = share.local_windows(layout.window)
    mine = window >= 0
    everything = bool(mine.all())
    lengths = _joined(groups, "lengths", np.int64)
    tokens = np.zeros(0, np.bool_) if everything else np.repeat(mine, lengths)

    def chosen(values: np.ndarray, which: np.ndarray = mine) -> np.ndarray:
        return values if everything else values[which]

    def of_rows(name: str, dtype: type) -> np.ndarray:
        return chosen(_joined(groups, name, dtype))

    def of_tokens(name: str, dtype: type) -> np.ndarray:
        return chosen(_joined(groups, name, dtype), tokens)

    advantages = batch_advantages(groups, config.algorithm, statistics) if groups else np.zeros(0, np.float32)
    rewards = token_rewards(groups, config.algorithm) if groups else None
    if rewards is None and config.algorithm.has_value_head:
        rewards = np.zeros(0, np.float32)
    own = Layout(chosen(window), chosen(layout.start), int(window.max(initial=-1)) + 1)
    arrays = pack(
        own,
        chosen(lengths),
        tokens=of_tokens("tokens", np.int32),
        loss_mask=of_tokens("loss_mask", np.bool_),
        behavior_logprobs=of_tokens("behavior_logprobs", np.float32),
        advantages=chosen(advantages, mine if len(advantages) == len(mine) else tokens),
        temperature=of_rows("temperature", np.float32),
        equal_version=_samplers(groups, chosen)
        * ((of_rows("version_min", np.int64) == clock) & (of_rows("version_max", np.int64) == clock)),
        rewards=None if rewards is None else chosen(rewards, tokens),
        num_windows=share.num_own(num_windows),
        window_tokens=window_tokens,
    )
    figures = Figures(
        counts=_counts(arrays, config, share),
        lengths=chosen(lengths),
        staleness=trajectory_staleness(of_rows("version_min", np.int64), clock),
        rewards=of_rows("rewards", np.float32),
        successes=of_rows("successes", np.float32),
        num_groups=len(groups),
    )
    return HostBatch(
        clock=clock,
        groups=groups,
        layout=layout,
        arrays=arrays,
        num_windows=num_windows,
        figures=figures,
        config=config,
        statistics=statistics,
    )


def _samplers(groups: Sequence[Group], chosen: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """uint8, per trajectory: see `sampler_number`."""
    numbers = [sampler_number(paths.parse_shard(group.rows.shard).actor_id) for group in groups]
    return chosen(np.repeat(np.array(numbers, np.uint8), [len(group.rows.index) for group in groups]))


def _joined(groups: Sequence[Group], name: str, dtype: type) -> np.ndarray:
    if len(groups) == 1:
        found: np.ndarray = getattr(groups[0].rows, name)
        return found
    return np.concatenate([np.zeros(0, dtype), *(getattr(g.rows, name) for g in groups)])


def update_of_window(num_windows: int, config: RunConfig, share: Share | None = None) -> np.ndarray:
    """int64 [N]: the update that each window goes into; the compiled step deals micro-batches out in the same way.

    It follows from the recorded layout and the run's configuration alone, so a replay cuts alike.

    Args:
        share: of the host whose windows they are; None: all windows of the batch.
    """
    num_shards = config.mesh.num_window_shards if share is None else len(share.own)
    return (
        np.arange(num_windows)
        // (config.learner.windows_per_microbatch * num_shards)
        % config.learner.updates_per_batch
    )


def _counts(arrays: PackedArrays, config: RunConfig, share: Share) -> np.ndarray:
    """int64 [K, 2], see `Figures`."""
    update = update_of_window(len(arrays.tokens), config, share)
    window, column = np.nonzero(arrays.loss_mask)
    sequence = window.astype(np.int64) << 32 | arrays.segment_ids[window, column]
    found = []
    for k in range(config.learner.updates_per_batch):
        own = update[window] == k
        found.append((int(own.sum()), len(np.unique(sequence[own]))))
    return np.array(found, np.int64)


def record_part(groups: Sequence[Group], layout: Layout, config: RunConfig) -> dict[str, Any]:
    """What one feed gives to a step record."""
    of_batch = config.algorithm.advantage == "reinforce_pp"
    return {
        "episode_advantages": episode_advantages(groups).tolist() if of_batch else None,
        "groups": [group_state(group) for group in groups],
        "window": layout.window.tolist(),
        "start": layout.start.tolist(),
        "num_windows": layout.num_windows,
    }


def joined_statistics(parts: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """From the `record_part` of all feeds, in their order: see `HostBatch.statistics`."""
    own = [part["episode_advantages"] for part in parts]
    return None if None in own else mean_and_deviation(np.concatenate([np.array(part, np.float64) for part in own]))


def step_record(
    parts: Sequence[Mapping[str, Any]],
    figures: Figures,
    *,
    clock: int,
    shape: tuple[int, int],
    incarnation: str,
    config: RunConfig,
    override: bool,
) -> dict[str, Any]:
    """The JSON that is committed before the step is dispatched; `write_step` adds the clock after it.

    Args:
        parts: of all feeds, in their order.
        figures: of the whole batch.
        shape: its windows, and tokens of each.
    """
    num_windows, window_tokens = shape
    return {
        "incarnation": incarnation,
        "rng": {"seed": config.seed, "step": clock},
        "groups": [group for part in parts for group in part["groups"]],
        "num_windows": num_windows,
        "window_tokens": window_tokens,
        "microbatch_windows": config.microbatch_windows,
        "layout": {
            "window": [window for part in parts for window in part["window"]],
            "start": [start for part in parts for start in part["start"]],
        },
        "advantage_statistics": joined_statistics(parts),
        "policy_tokens": int(figures.counts[:, 0].sum()),
        "mean_staleness": float(figures.staleness.mean()),
        "throttle_override": override,
    }


def batch_of_record(
    record: Mapping[str, Any],
    fetch: FetchRows,
    config: RunConfig,
    share: Share | None = None,
    complete: Callable[[HostBatch], HostBatch] = lambda batch: batch,
) -> HostBatch:
    """The batch that a step record describes, equal to the bit to the one that was recorded.

    Args:
        share: of several hosts this one's, which reads only groups of which its windows hold something.
        complete: adds the other hosts' figures.

    Raises:
        CorruptObject: its rows cannot be read, or do not make that batch.
        ObjectMissing: a shard is gone.
        ConfigError: on this mesh its windows would go into other updates.
    """
    share = share or share_of_one(config)
    _check_updates(record, config)
    window = np.array(record["layout"]["window"], np.int32)
    start = np.array(record["layout"]["start"], np.int32)
    ends = np.cumsum([len(entry["rows"]) for entry in record["groups"]])
    mine = share.local_windows(window) >= 0
    groups, kept = [], np.zeros(len(window), np.bool_)
    for arrival, (entry, end) in enumerate(zip(record["groups"], ends.tolist(), strict=True)):
        of_group = slice(end - len(entry["rows"]), end)
        if mine[of_group].any():
            groups.append(group_of_record(entry, fetch, arrival))
            kept[of_group] = True
    layout = Layout(window[kept], start[kept], int(window.max()) + 1)
    tokens = record.get("window_tokens", config.learner.window_tokens)
    # Another mesh pads to other numbers than the one that recorded.
    shape = padded(layout.num_windows, size_for(window_sizes(config), tokens).counts), tokens
    statistics = record.get("advantage_statistics")
    if statistics is None and config.algorithm.advantage == "reinforce_pp" and not share.is_whole:
        raise CorruptObject(f"step record {record['clock']}: received no statistics of the batch's advantages")
    statistics = None if statistics is None else tuple(statistics)
    batch = complete(build(groups, record["clock"] - 1, layout, shape, config, share, statistics))
    # A group may lie in windows of two hosts, which both counted it.
    batch = dataclasses.replace(batch, figures=batch.figures._replace(num_groups=len(record["groups"])))
    if batch.policy_tokens != record["policy_tokens"]:
        raise CorruptObject(
            f"step record {record['clock']}: received rows with {batch.policy_tokens} policy tokens, "
            f"recorded {record['policy_tokens']}"
        )
    return batch


def _check_updates(record: Mapping[str, Any], config: RunConfig) -> None:
    unit = record.get("microbatch_windows", config.microbatch_windows)
    if config.learner.updates_per_batch > 1 and unit != config.microbatch_windows:
        raise ConfigError(
            "mesh",
            {"data": config.mesh.data, "fsdp": config.mesh.fsdp},
            f"data * fsdp with {unit} windows in a micro-batch, as step {record['clock']} was recorded, at "
            f"learner.updates_per_batch = {config.learner.updates_per_batch}",
            "Restart on a mesh with that data * fsdp: on another one windows would go into other updates than before.",
        )


def group_of_record(entry: Mapping[str, Any], fetch: FetchRows, arrival: int = 0) -> Group:
    """The group that an entry of a step record names. Raises as `batch_of_record` does."""
    rows = fetch([RowRef(shard=entry["shard"], row=row) for row in entry["rows"]])
    return Group(
        group_id=entry["group_id"],
        rows=rows,
        advantages=np.array(entry["advantages"], np.float32),
        arrival=arrival,
        num_bytes=rows.num_bytes,
        uses=entry.get("uses", 0),
    )

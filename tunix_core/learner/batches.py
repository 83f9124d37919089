"""A batch on the host, and its step record: what makes a step repeatable to the bit.

The record names the rows in order, their advantages (which were computed over whole groups, of which
an overlong member may be missing here), the window layout, the denominator and the seed. Executing it
again needs nothing but the shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunix_core.config import RunConfig
from tunix_core.data.buffer import FetchRows, group_state
from tunix_core.data.groups import Group, trajectory_staleness
from tunix_core.data.packing import Layout, PackedArrays, best_fit, pack
from tunix_core.errors import CorruptObject
from tunix_core.learner.credit import batch_advantages, token_rewards
from tunix_core.rl.aggregation import denominator
from tunix_core.types import RowRef


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HostBatch:
    """Packed and ready for the device; N windows of W tokens."""

    clock: int
    """Of the consuming step, before it."""
    groups: Sequence[Group]
    layout: Layout
    arrays: PackedArrays
    policy_tokens: int
    denominator: np.ndarray  # float32 [K]
    """What the loss of each update divides its sum by, see `rl.aggregation`; 0 where it has no policy token."""
    num_tokens: int
    staleness: np.ndarray  # int64 [trajectories]
    rewards: np.ndarray  # float32 [trajectories]
    successes: np.ndarray  # float32 [trajectories]

    @property
    def num_windows(self) -> int:
        return int(self.arrays.tokens.shape[0])


def assemble(groups: Sequence[Group], clock: int, counts: Sequence[int], config: RunConfig) -> HostBatch:
    """Pack groups into the smallest compiled number of windows that holds them.

    Args:
        counts: compiled window counts, rising; the last one holds the groups.
    """
    layout = best_fit(np.concatenate([g.rows.lengths for g in groups]), config.learner.window_tokens)
    num_windows = next(count for count in counts if count >= layout.num_windows)
    return _build(groups, clock, layout, num_windows, config)


def _build(groups: Sequence[Group], clock: int, layout: Layout, num_windows: int, config: RunConfig) -> HostBatch:
    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(g.rows, name) for g in groups])

    lengths = joined("lengths")
    arrays = pack(
        layout,
        lengths,
        tokens=joined("tokens"),
        loss_mask=joined("loss_mask"),
        behavior_logprobs=joined("behavior_logprobs"),
        advantages=batch_advantages(groups, config.algorithm),
        temperature=joined("temperature"),
        equal_version=(joined("version_min") == clock) & (joined("version_max") == clock),
        rewards=token_rewards(groups, config.algorithm),
        num_windows=num_windows,
        window_tokens=config.learner.window_tokens,
    )
    return HostBatch(
        clock=clock,
        groups=groups,
        layout=layout,
        arrays=arrays,
        policy_tokens=int(arrays.loss_mask.sum()),
        denominator=_denominators(arrays, config),
        num_tokens=int(lengths.sum()),
        staleness=trajectory_staleness(groups, clock),
        rewards=joined("rewards"),
        successes=joined("successes"),
    )


def update_of_window(num_windows: int, config: RunConfig) -> np.ndarray:
    """int64 [N]: the update that each window goes into; the compiled step deals micro-batches out in the same way.

    It follows from the recorded layout and the run's configuration alone, so a replay cuts alike.
    """
    return np.arange(num_windows) // config.microbatch_windows % config.learner.updates_per_batch


def _denominators(arrays: PackedArrays, config: RunConfig) -> np.ndarray:
    """float32 [K]"""
    update = update_of_window(len(arrays.tokens), config)
    window, column = np.nonzero(arrays.loss_mask)
    sequence = window.astype(np.int64) << 32 | arrays.segment_ids[window, column]
    found = []
    for k in range(config.learner.updates_per_batch):
        own = update[window] == k
        found.append(
            denominator(
                config.algorithm.aggregation,
                num_policy_tokens=int(own.sum()),
                num_sequences=len(np.unique(sequence[own])),
                constant_tokens=config.algorithm.constant_tokens,
            )
        )
    return np.array(found, np.float32)


def step_record(batch: HostBatch, *, incarnation: str, seed: int, override: bool) -> dict[str, Any]:
    """The JSON that is committed before the step is dispatched; `write_step` adds the clock after it."""
    return {
        "incarnation": incarnation,
        "rng": {"seed": seed, "step": batch.clock},
        "groups": [group_state(group) for group in batch.groups],
        "num_windows": batch.num_windows,
        "layout": {"window": batch.layout.window.tolist(), "start": batch.layout.start.tolist()},
        "policy_tokens": batch.policy_tokens,
        "mean_staleness": float(batch.staleness.mean()),
        "throttle_override": override,
    }


def batch_of_record(record: Mapping[str, Any], fetch: FetchRows, config: RunConfig) -> HostBatch:
    """The batch that a step record describes, equal to the bit to the one that was recorded.

    Raises:
        CorruptObject: its rows cannot be read, or do not make that batch.
        ObjectMissing: a shard is gone.
    """
    groups = []
    for arrival, entry in enumerate(record["groups"]):
        rows = fetch([RowRef(shard=entry["shard"], row=row) for row in entry["rows"]])
        groups.append(
            Group(
                group_id=entry["group_id"],
                rows=rows,
                advantages=np.array(entry["advantages"], np.float32),
                arrival=arrival,
                num_bytes=rows.num_bytes,
            )
        )
    window = np.array(record["layout"]["window"], np.int32)
    start = np.array(record["layout"]["start"], np.int32)
    layout = Layout(window, start, int(window.max()) + 1)
    batch = _build(groups, record["clock"] - 1, layout, record["num_windows"], config)
    if batch.policy_tokens != record["policy_tokens"]:
        raise CorruptObject(
            f"step record {record['clock']}: received rows with {batch.policy_tokens} policy tokens, "
            f"recorded {record['policy_tokens']}"
        )
    return batch

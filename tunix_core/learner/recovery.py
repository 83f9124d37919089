"""Back to where a learner died: the newest checkpoint, then the step records after it, then on.

The clock resumes where it stood, no trajectory is trained on twice or lost, and on the same mesh and
flags the parameters are bit-identical to those of a run that never died. Rows of a replayed step are
taken out of the restored buffer; rows that the restored cursors have not passed are remembered, so
that the reader's delivery of them counts nothing twice. With no readable checkpoint everything is
replayed from policy 0, since step records and shards are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tunix_core.config import RunConfig
from tunix_core.data.buffer import ReplayBuffer
from tunix_core.data.rows import RowFetcher
from tunix_core.learner.batches import HostBatch, batch_of_record
from tunix_core.learner.checkpointing import load_newest
from tunix_core.learner.trainer import State, Trainer
from tunix_core.storage.quarantine import quarantine_row
from tunix_core.storage.step_records import read_steps
from tunix_core.storage.store import ObjectStore


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Restored:
    """Where a checkpoint, or policy 0, puts the learner."""

    state: State
    totals: Mapping[str, Any]
    """Of the checkpoint; empty without one."""
    checkpoint_clock: int | None
    refused: list[str]
    """Newer checkpoints that could not be used, and why."""


def restore(
    store: ObjectStore, trainer: Trainer, buffer: ReplayBuffer, policy_zero: Mapping[str, np.ndarray]
) -> Restored:
    """Fill `buffer` and return the state; without a checkpoint both are those of clock 0."""
    checkpoint, refused = load_newest(store)
    if checkpoint is None:
        return Restored(state=trainer.initial_state(policy_zero), totals={}, checkpoint_clock=None, refused=refused)
    lost = buffer.restore(checkpoint.buffer, dict(checkpoint.seen), RowFetcher(store))
    for ref, reason in lost.items():
        quarantine_row(store, ref, reason)
    return Restored(
        state=trainer.from_host(checkpoint.state),
        totals=checkpoint.totals,
        checkpoint_clock=checkpoint.clock,
        refused=refused,
    )


def replay(
    store: ObjectStore, buffer: ReplayBuffer, config: RunConfig, execute: Callable[[HostBatch, dict[str, Any]], None]
) -> Iterator[int]:
    """Execute the step records after the buffer's clock, in order; yields the clock after each.

    Args:
        execute: takes the batch through the compiled step; its windows are those of the record.

    Raises:
        CorruptObject, ObjectMissing: a record's rows are gone; going on would train on other data than before.
    """
    fetch = RowFetcher(store)
    for record in read_steps(store, buffer.clock):
        batch = batch_of_record(record, fetch, config)
        for group in batch.groups:
            buffer.consume_again(group.rows, group.group_id)
        execute(batch, record)
        buffer.advance(record["clock"])
        yield record["clock"]

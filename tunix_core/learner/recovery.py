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

from tunix_core.config import RunConfig
from tunix_core.data.buffer import ReplayBuffer
from tunix_core.data.rows import RowFetcher
from tunix_core.data.sharing import dealt, feed_of_shard
from tunix_core.distributed.hosts import ALONE, Hosts, Share
from tunix_core.errors import ObjectMissing
from tunix_core.learner.batches import HostBatch, batch_of_record, group_of_record
from tunix_core.learner.checkpointing import load_newest
from tunix_core.learner.trainer import State, Trainer
from tunix_core.paths import parse_shard
from tunix_core.storage.parts import Tensors
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
    store: ObjectStore,
    trainer: Trainer,
    buffer: ReplayBuffer,
    policy_zero: Tensors,
    hosts: Hosts = ALONE,
    share: Share | None = None,
) -> Restored:
    """Fill `buffer` and return the state; without a checkpoint both are those of clock 0.

    The checkpoint may come from another number of hosts, on another mesh.
    """
    checkpoint, refused = load_newest(store, hosts=hosts)
    if checkpoint is None:
        return Restored(state=trainer.initial_state(policy_zero), totals={}, checkpoint_clock=None, refused=refused)
    feed, num_feeds = (share.feed, share.num_feeds) if share else (0, 1)
    if share is None or share.leads:
        lost = buffer.restore(dealt(checkpoint.buffers, feed, num_feeds), checkpoint.seen, RowFetcher(store))
        for ref, reason in lost.items():
            quarantine_row(store, ref, reason)
    else:
        buffer.advance(checkpoint.clock)
    return Restored(
        state=trainer.from_host(checkpoint.state),
        totals=checkpoint.totals,
        checkpoint_clock=checkpoint.clock,
        refused=refused,
    )


def replay(
    store: ObjectStore,
    buffer: ReplayBuffer,
    config: RunConfig,
    execute: Callable[[HostBatch, dict[str, Any]], None],
    hosts: Hosts = ALONE,
    share: Share | None = None,
) -> Iterator[int]:
    """Execute the step records after the buffer's clock, in order; yields the clock after each.

    Args:
        execute: takes the batch through the compiled step; its windows are those of the record.

    Raises:
        CorruptObject, ObjectMissing: a record's rows are gone; going on would train on other data than before.
    """
    fetch = RowFetcher(store)

    def complete(batch: HostBatch) -> HostBatch:
        parts = hosts.gather("replay", batch.figures.to_json() if share is None or share.leads else None)
        return batch.completed([part for part in parts if part is not None])

    for record in _agreed_records(store, buffer.clock, hosts):
        batch = batch_of_record(record, fetch, config, share, complete)
        held = {group.group_id: group for group in batch.groups}
        for entry in record["groups"]:
            if share is not None and not share.leads:
                continue
            if share is None or share.num_feeds == 1:
                buffer.consume_again(held[entry["group_id"]])
            elif feed_of_shard(entry["shard"], share.num_feeds) != share.feed:
                buffer.note_delivered(entry["group_id"], parse_shard(entry["shard"]).incarnation)
            else:
                buffer.consume_again(held.get(entry["group_id"]) or group_of_record(entry, fetch))
        execute(batch, record)
        buffer.advance(record["clock"])
        yield record["clock"]


def _agreed_records(store: ObjectStore, clock: int, hosts: Hosts) -> list[dict[str, Any]]:
    """The same ones on every host. One may be committed meanwhile, by a life that was thought over: the others look only
    after host 0 has counted."""
    records = read_steps(store, clock) if hosts.is_first else []
    count: int = hosts.lead("replay", None, lambda _: len(records))
    if not hosts.is_first:
        records = read_steps(store, clock)
        if len(records) < count:
            raise ObjectMissing(
                f"step records after {clock}: received {len(records)}, accepted {count}, as host 0 found"
            )
    return records[:count]

"""Blocks of task indices, `tasks/<epoch>/<block>.json`: each is claimed by one actor at a time.

Epochs follow each other without end; an epoch is `epoch_size` tasks, cut into blocks. Blocks are claimed
in order, and a block only after its predecessor, so the claimed ones are always the first so many:
a new claimant finds their end by doubling and halving, a running one remembers it.

A finished block says so. `tasks/FINISHED.json` counts how many of the first blocks are finished, so
that the search for a dead actor's unfinished blocks looks only at those in flight. The count may lag,
which costs requests, never tasks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from tunix_core import paths
from tunix_core.errors import (
    ConfigError,
    CorruptObject,
    Fenced,
    ObjectExists,
    ObjectMissing,
    StoreError,
    VersionConflict,
)
from tunix_core.storage.store import (
    ObjectStore,
    from_json,
    map_requests,
    read_json,
    read_json_or_none,
    to_json,
    update_json,
)
from tunix_core.storage.writers import read_writer

_MAX_COUNTED_PER_FINISH = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskBlock:
    """Tasks `start` (inclusive) to `stop` of an epoch."""

    epoch: int
    block: int
    start: int
    stop: int


class TaskBlocks:
    """One claimant: an actor incarnation. Not shared between threads."""

    def __init__(self, store: ObjectStore, *, incarnation: str, epoch_size: int, block_size: int) -> None:
        """
        Args:
            epoch_size: tasks per epoch; with `block_size` the same for every claimant of a run.
            block_size: tasks per block; an epoch's last block may be shorter.
        """
        if not 1 <= block_size <= epoch_size:
            raise ConfigError("block_size", block_size, f"1 to epoch_size = {epoch_size}", "Choose smaller blocks.")
        self._store = store
        self._incarnation = incarnation
        self._epoch_size = epoch_size
        self._block_size = block_size
        self._blocks_per_epoch = -(-epoch_size // block_size)
        self._end = 0
        """Blocks before this index (counted over all epochs) are known to be claimed."""

    def claim(self, dead: Collection[str] | None = None) -> TaskBlock:
        """A dead incarnation's unfinished block, or else the next unclaimed one.

        Args:
            dead: incarnations that hold their blocks no longer; None: those whose announcement in
                `writers/` is closed or fenced.

        Raises:
            StoreError: nothing was claimed, or, should the store have lost an answer, a block that
                stays with this incarnation until it is dead.
        """
        reclaimed = self._reclaim(dead)
        if reclaimed is not None:
            return reclaimed
        self._find_end()
        while True:
            index = self._end
            try:
                self._store.put_if_absent(self._key(index), to_json(self._record(index, claims=1)))
            except ObjectExists:
                self._end += 1
                continue
            self._end += 1
            return self._block(index)

    def finish(self, block: TaskBlock) -> None:
        """Mark it done: every group of it is in a shard.

        Raises:
            Fenced: the block was taken from this incarnation.
        """
        key = paths.task_block(block.epoch, block.block)

        def mark(current: dict[str, Any] | None) -> dict[str, Any] | None:
            if current is None or current["incarnation"] != self._incarnation:
                raise Fenced(f"{key}: held by {current and current['incarnation']}, not by {self._incarnation}")
            return None if current["finished"] else {**current, "finished": True}

        update_json(self._store, key, mark)
        self._count_finished()

    # --- how ---

    def _block(self, index: int) -> TaskBlock:
        epoch, block = divmod(index, self._blocks_per_epoch)
        start = block * self._block_size
        return TaskBlock(epoch=epoch, block=block, start=start, stop=min(start + self._block_size, self._epoch_size))

    def _key(self, index: int) -> str:
        return paths.task_block(*divmod(index, self._blocks_per_epoch))

    def _record(self, index: int, *, claims: int) -> dict[str, Any]:
        block = dataclasses.asdict(self._block(index))
        return {**block, "incarnation": self._incarnation, "finished": False, "claims": claims}

    def _find_end(self) -> None:
        """Move `_end` to the first unclaimed block: about 2 log2(distance) requests."""
        low, stride = self._end, 1
        if not self._store.exists(self._key(low)):
            return
        while self._store.exists(self._key(low + stride)):
            low, stride = low + stride, stride * 2
        high = low + stride  # low is claimed, high is not
        while high - low > 1:
            middle = (low + high) // 2
            if self._store.exists(self._key(middle)):
                low = middle
            else:
                high = middle
        self._end = high

    def _num_finished(self) -> int:
        value = read_json_or_none(self._store, paths.FINISHED_BLOCKS)
        return int(value["num_finished"]) if value else 0

    def _reclaim(self, dead: Collection[str] | None) -> TaskBlock | None:
        if dead is not None and not dead:
            return None
        first = self._num_finished()
        self._end = max(self._end, first)
        self._find_end()
        indices = range(first, self._end)
        for index, record in zip(indices, map_requests(self._store, self._read, indices), strict=True):
            owner = record["incarnation"]
            if record["finished"] or owner == self._incarnation or not self._is_dead(owner, dead):
                continue
            try:
                data, version = self._store.get_with_version(self._key(index))
                current = from_json(self._key(index), data)
                if current["incarnation"] != owner or current["finished"]:
                    continue
                mine = self._record(index, claims=int(current["claims"]) + 1)
                self._store.put_if_version(self._key(index), to_json(mine), version)
            except VersionConflict:
                continue  # another claimant was faster
            return self._block(index)
        return None

    def _read(self, index: int) -> dict[str, Any]:
        key = self._key(index)
        record = read_json(self._store, key)
        if not {"incarnation", "finished", "claims"} <= record.keys():
            raise CorruptObject(f"{key}: received fields {sorted(record)}, accepted incarnation, finished, claims, …")
        if {**record, **dataclasses.asdict(self._block(index))} != record:
            raise ConfigError(
                "task blocks",
                {"epoch_size": self._epoch_size, "block_size": self._block_size},
                f"the sizes by which {key} was cut: {record}",
                "Every actor of a run cuts tasks alike.",
            )
        return record

    def _is_dead(self, owner: str, dead: Collection[str] | None) -> bool:
        if dead is not None:
            return owner in dead
        try:
            record = read_writer(self._store, owner)
        except ObjectMissing:
            return False  # it claims before it announces itself
        return record.closed or record.fenced

    def _count_finished(self) -> None:
        first = self._num_finished()
        count = first
        while count < first + _MAX_COUNTED_PER_FINISH:
            record = read_json_or_none(self._store, self._key(count))
            if record is None or not record["finished"]:
                break
            count += 1
        if count == first:
            return

        def raise_to(current: dict[str, Any] | None) -> dict[str, Any] | None:
            return None if current and int(current["num_finished"]) >= count else {"num_finished": count}

        try:
            update_json(self._store, paths.FINISHED_BLOCKS, raise_to, retries=3)
        except StoreError:
            return  # a hint: the next one to finish counts again


def claim_block(
    store: ObjectStore, *, incarnation: str, epoch_size: int, block_size: int, dead: Collection[str] | None = None
) -> TaskBlock:
    """One claim without memory of the last; an actor keeps a `TaskBlocks` instead."""
    return TaskBlocks(store, incarnation=incarnation, epoch_size=epoch_size, block_size=block_size).claim(dead)


def finish_block(store: ObjectStore, block: TaskBlock, *, incarnation: str, epoch_size: int, block_size: int) -> None:
    """Like `TaskBlocks.finish`."""
    TaskBlocks(store, incarnation=incarnation, epoch_size=epoch_size, block_size=block_size).finish(block)

"""Writes one actor incarnation's shards: numbered 0, 1, 2, … without holes, each created only once."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence

from tunix_core import paths
from tunix_core.errors import CorruptObject, DataError, Fenced, ObjectExists, StoreError
from tunix_core.storage.shards import check_group_sizes, check_readable, encode, read_metadata
from tunix_core.storage.store import ObjectStore, write_json_if_absent
from tunix_core.storage.writers import (
    WriterRecord,
    announce_hour,
    check_names,
    put_tombstone,
    read_writer,
    update_writer,
)
from tunix_core.types import Trajectory


class TrajectoryWriter:
    """Opening it announces the incarnation; `close` ends it with a tombstone."""

    def __init__(
        self, store: ObjectStore, *, actor_id: str, incarnation: str, clock: Callable[[], float] = time.time
    ) -> None:
        """
        Args:
            actor_id: of a-z 0-9 _ and '.': the shard's name uses '-' between its parts.
            incarnation: of a-z 0-9, never used before; see `writers.new_incarnation`.
            clock: seconds since the epoch; only partitions depend on it.

        Raises:
            ConfigError: an id that does not fit.
            Fenced: the incarnation has been used.
        """
        check_names(actor_id, incarnation)
        self._store = store
        self._clock = clock
        self._nonce = uuid.uuid4().hex
        self._sequence = 0
        self._unsure = False
        self._record = WriterRecord(incarnation=incarnation, actor_id=actor_id, created_at=clock())
        announcement = {**self._record.to_dict(), "nonce": self._nonce}
        try:
            write_json_if_absent(store, paths.writer(incarnation), announcement)
        except ObjectExists:
            raise Fenced(f"writer {incarnation}: another process has used this incarnation") from None

    @property
    def incarnation(self) -> str:
        return self._record.incarnation

    @property
    def actor_id(self) -> str:
        return self._record.actor_id

    @property
    def next_sequence(self) -> int:
        """Shards written so far."""
        return self._sequence

    def write(self, trajectories: Sequence[Trajectory]) -> str:
        """Commit one shard of whole groups; returns its key. Its sequence number is `next_sequence` before.

        A group belongs into one shard, and every row carries `group_size`, so that readers see which
        members are missing. After a StoreError the same call can be repeated: should the first attempt have
        landed, the repetition finds it and writes nothing twice.

        Raises:
            Fenced: another process ended this incarnation.
            DataError: no trajectories, more than readers take in, a group with too many episodes, or the writer is closed.
            StoreError: the store failed; nothing or the whole shard has landed.
        """
        if self._record.closed:
            raise DataError(f"writer {self.incarnation}: it is closed; open another incarnation")
        if not trajectories:
            raise DataError("trajectories: received none, accepted at least one per shard")
        check_group_sizes(trajectories)
        metadata = {"actor_id": self.actor_id, "incarnation": self.incarnation, "writer": self._nonce}
        data = encode(trajectories, metadata=metadata)
        check_readable(data)
        while True:
            self._announce()
            key = self._record.shard_key(self._sequence)
            try:
                self._store.put_if_absent(key, data)
                landed = data
            except ObjectExists:
                landed = self._own_shard(key)
            except StoreError:
                self._unsure = True
                raise
            self._sequence += 1
            self._unsure = False
            if landed == data:
                return key
            # what landed is an earlier call's, whose answer was lost: it counts, and this one is next

    def close(self) -> None:
        """End the incarnation; fine to call twice.

        Raises:
            Fenced: another process ended it first.
        """
        if self._record.closed:
            return
        if read_writer(self._store, self.incarnation).fenced:
            raise Fenced(f"writer {self.incarnation}: declared dead by another process")
        final = put_tombstone(self._store, self._record, self._sequence)
        self._sequence = final
        self._record = update_writer(self._store, self.incarnation, closed=True, next_sequence=final)

    def _announce(self) -> None:
        hours = self._record.hours
        if hours and self._unsure:
            return  # the number in doubt stays in its hour, or it could exist in two
        partition = max(paths.hour_partition(self._clock()), hours[-1][0] if hours else "")
        if not hours or partition > hours[-1][0]:
            self._record = announce_hour(self._store, self._record, partition, self._sequence)

    def _own_shard(self, key: str) -> bytes:
        """The bytes at a taken key if this writer put them there; else another one did, which fences it."""
        landed = self._store.get(key)
        try:
            metadata = read_metadata(landed)
        except CorruptObject:
            metadata = {}
        if metadata.get("writer") != self._nonce:
            raise Fenced(f"writer {self.incarnation}: {key} was written by another process")
        return landed

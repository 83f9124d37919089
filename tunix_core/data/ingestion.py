"""From the shards into the buffer: poll, sort, note the cursors, record what was refused."""

from __future__ import annotations

from collections.abc import Callable

from tunix_core.data.buffer import ReplayBuffer
from tunix_core.data.rows import from_shard
from tunix_core.storage.quarantine import quarantine_rows, quarantine_shard
from tunix_core.storage.store import ObjectStore
from tunix_core.storage.trajectory_reader import ShardRead, TrajectoryReader


class Ingestion:
    """Owns the reader. One thread calls `poll`; the buffer's `cursors` always match its contents."""

    def __init__(
        self,
        store: ObjectStore,
        buffer: ReplayBuffer,
        *,
        vocab_size: int,
        with_turns: bool = False,
        max_shards: int = 64,
        owns: Callable[[str, int], bool] = lambda *_: True,
    ) -> None:
        """
        Args:
            with_turns: the algorithm needs what each turn was paid.
            owns: which shards this feed reads, see `sharing.ownership`.
        """
        self._store = store
        self._buffer = buffer
        self._max_shards = max_shards
        self._with_turns = with_turns
        self.reader = TrajectoryReader(store, buffer.cursors, vocab_size=vocab_size, owns=owns)
        self.num_shards = 0

    def poll(self) -> int:
        """Read what is new, at most `max_shards`; returns the number of shards read.

        Raises:
            StoreError: nothing was read; call again.
        """
        reads = self.reader.poll(self._max_shards)
        refused: list[tuple[ShardRead, dict[int, str]]] = []
        # A checkpoint taken between a shard's rows and its cursor would lose the shard or read it twice.
        with self._buffer.lock:
            for read in reads:
                if read.rows is None:
                    self._buffer.add_unreadable(read.key, read.num_bytes)
                    refused.append((read, {}))
                    continue
                rows = from_shard(read.key, read.rows, incarnation=read.incarnation, with_turns=self._with_turns)
                if faults := self._buffer.add(rows):
                    refused.append((read, faults))
            self._buffer.cursors = self.reader.state()
        # Written after the fact: a crash in between reads the shard again, and refuses it again.
        for read, faults in refused:
            if read.rows is None:
                quarantine_shard(self._store, read.key, read.fault or "unreadable", num_bytes=read.num_bytes)
            else:
                quarantine_rows(self._store, read.key, faults)
        self.num_shards += len(reads)
        return len(reads)

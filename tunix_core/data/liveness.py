"""Which actor incarnations are alive: who gets a share of the capacity, and who is declared dead.

An incarnation is alive while its actor's heartbeat, which names the incarnation, goes on changing.
What counts is whether this process sees it change, so the clocks of two hosts are never compared. A
silent one loses its share at once, and with it its groups in flight stop counting. It is fenced, for
good, when a newer incarnation of the same actor lives; or after 15 s, when a supervisor's record says
that it exited or its process is gone from this host; or after a minute of silence. Being wrong then
costs that actor its life, not data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from tunix_core.processes import ProcessIdentity
from tunix_core.storage.control import ProcessRecord, read_heartbeats, read_processes
from tunix_core.storage.store import ObjectStore
from tunix_core.storage.writers import fence_incarnation

LIVE_SECONDS = 10.0
FENCE_SECONDS = 15.0
FENCE_UNPROVEN_SECONDS = 60.0
MAX_GAP_SECONDS = 5.0


def process_is_gone(record: ProcessRecord) -> bool:
    """Whether a supervisor's record proves that its process runs no longer; of another host only its word counts."""
    if record.state == "exited":
        return True
    if record.pid is None or record.pid_start is None:
        return False
    identity = ProcessIdentity(
        host=record.host, boot_id=record.boot_id, pid=record.pid, pid_start=int(record.pid_start)
    )
    return identity.is_local and not identity.is_alive()


class Liveness:
    """Call `update` about once a second, with the reader's live incarnations in rank order."""

    def __init__(self, store: ObjectStore, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._monotonic = monotonic
        self._last_update: float | None = None
        self._beats: dict[str, float] = {}
        """Incarnation -> its last heartbeat's time, by its own clock."""
        self._silence: dict[str, float] = {}
        """Incarnation -> seconds without a new heartbeat."""
        self.num_fenced = 0

    def update(self, writers: Mapping[str, str]) -> list[str]:
        """Fence the dead; return the living in rank order.

        Args:
            writers: incarnation -> actor id, of writers that have not ended, in rank order (oldest first).
        """
        now = self._monotonic()
        # A gap between two updates is ours, or the store's: it says little about the actors.
        passed = 0.0 if self._last_update is None else min(now - self._last_update, MAX_GAP_SECONDS)
        self._last_update = now
        beats = {b.progress.get("incarnation"): b.updated_at for b in read_heartbeats(self._store).values()}
        for name in writers:
            is_new = name in beats and beats[name] != self._beats.get(name)
            self._silence[name] = 0.0 if is_new else self._silence.get(name, 0.0) + passed
            if is_new:
                self._beats[name] = beats[name]
        replaced = self._replaced(writers)
        live = [name for name in writers if self._silence[name] <= LIVE_SECONDS and name not in replaced]
        silent = [name for name in writers if name not in live]
        if silent:
            records = read_processes(self._store)
            for name in silent:
                if name in replaced or self._is_dead(writers[name], self._silence[name], records):
                    fence_incarnation(self._store, name)
                    self.num_fenced += 1
        for name in [n for n in self._silence if n not in writers]:
            del self._silence[name]
            self._beats.pop(name, None)
        return live

    def _replaced(self, writers: Mapping[str, str]) -> set[str]:
        """Those of whose actor a newer incarnation has shown a heartbeat."""
        replaced: set[str] = set()
        newer: set[str] = set()
        for name in reversed(list(writers)):
            if writers[name] in newer:
                replaced.add(name)
            elif name in self._beats:
                newer.add(writers[name])
        return replaced

    @staticmethod
    def _is_dead(actor_id: str, silence_seconds: float, records: Mapping[str, ProcessRecord]) -> bool:
        if silence_seconds > FENCE_UNPROVEN_SECONDS:
            return True
        names = {process.replace("-", "_"): record for process, record in records.items()}
        record = names.get(actor_id) or names.get(actor_id.rpartition("_")[0])  # its own, or its pool's
        return silence_seconds > FENCE_SECONDS and record is not None and process_is_gone(record)

"""Which actor incarnations are alive: who gets a share of the capacity, and who is declared dead.

An incarnation is alive while its actor's heartbeat, which names the incarnation, goes on changing.
What counts is when this process last saw it change, so the clocks of two hosts are never compared.
A silent one loses its share at once, and with it its groups in flight stop counting. It is fenced, for
good, only on proof: a newer incarnation of the same actor lives, or its supervisor says that it
exited, or its process is gone from this host. Without a supervisor's record, long silence has to do.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tunix_core.storage.control import Heartbeat, ProcessRecord, read_heartbeats, read_processes
from tunix_core.storage.store import ObjectStore
from tunix_core.storage.writers import fence_incarnation

LIVE_SECONDS = 10.0
FENCE_SECONDS = 15.0
FENCE_UNSUPERVISED_SECONDS = 60.0


def process_is_gone(record: ProcessRecord) -> bool:
    """Whether a supervisor's record proves that its process runs no longer. A pid counts on its own host and boot only."""
    if record.state == "exited":
        return True
    if record.host != socket.gethostname() or record.pid is None or record.boot_id != _boot_id():
        return False
    return not Path(f"/proc/{record.pid}").exists() if os.path.isdir("/proc/self") else False


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


class Liveness:
    """Call `update` about once a second, with the reader's live incarnations in rank order."""

    def __init__(self, store: ObjectStore, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._monotonic = monotonic
        self._changed: dict[str, tuple[float, float]] = {}
        """Incarnation -> (its heartbeat's time, when we saw that change)."""
        self._process: dict[str, str] = {}
        self.num_fenced = 0

    def update(self, writers: Mapping[str, str]) -> list[str]:
        """Fence the dead; return the living in rank order.

        Args:
            writers: incarnation -> actor id, of writers that have not ended, in rank order (oldest first).
        """
        now = self._monotonic()
        self._observe(read_heartbeats(self._store), now)
        for incarnation in writers:
            self._changed.setdefault(incarnation, (0.0, now))  # announced a moment ago, no heartbeat yet
        silence = {name: now - self._changed[name][1] for name in writers}
        live = [name for name in writers if silence[name] <= LIVE_SECONDS and not self._replaced(name, writers)]
        silent = [name for name in writers if name not in live]
        if silent:
            records = read_processes(self._store)
            for name in silent:
                if self._replaced(name, writers) or self._is_dead(name, writers[name], silence[name], records):
                    fence_incarnation(self._store, name)
                    self.num_fenced += 1
        for name in [n for n in self._changed if n not in writers]:
            del self._changed[name]
        return live

    def _observe(self, beats: Mapping[str, Heartbeat], now: float) -> None:
        for process, beat in beats.items():
            incarnation = beat.progress.get("incarnation")
            if isinstance(incarnation, str):
                self._process[incarnation] = process
                if self._changed.get(incarnation, (0.0, 0.0))[0] != beat.updated_at:
                    self._changed[incarnation] = (beat.updated_at, now)

    def _replaced(self, name: str, writers: Mapping[str, str]) -> bool:
        """A newer incarnation of the same actor has shown a heartbeat."""
        later = list(writers)[list(writers).index(name) + 1 :]
        return any(writers[other] == writers[name] and self._changed[other][0] > 0 for other in later)

    def _is_dead(
        self, name: str, actor_id: str, silence_seconds: float, records: Mapping[str, ProcessRecord]
    ) -> bool:
        process = self._process.get(name) or next((p for p in records if p.replace("-", "_") == actor_id), None)
        record = records.get(process) if process else None
        if record is None:
            return silence_seconds > FENCE_UNSUPERVISED_SECONDS
        return silence_seconds > FENCE_SECONDS and process_is_gone(record)

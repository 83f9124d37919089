"""The frame of a process that does a round of work at an interval until the run ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tunix_core.errors import Interrupted, StoreError
from tunix_core.storage.control import read_stop, write_heartbeat
from tunix_core.storage.metrics_files import MetricFiles
from tunix_core.storage.store import ObjectStore

HEARTBEAT_SECONDS = 1.0
FLUSH_SECONDS = 2.0
MAX_STORE_FAILURE_SECONDS = 300.0


def run_rounds(
    store: ObjectStore,
    work: Callable[[], object],
    *,
    interval_seconds: float,
    process: str,
    metrics: MetricFiles,
    progress: Callable[[], Mapping[str, Any]],
    interrupted: threading.Event,
) -> None:
    """`work()` every `interval_seconds`, a heartbeat every second, and one last round after the stop request.

    A store that fails is tried again at the next round.

    Raises:
        Interrupted: a signal came before the stop request; what was begun is finished.
        StoreError: the store has failed for five minutes.
    """
    due_work = due_beat = due_flush = 0.0
    last_good = time.monotonic()
    while True:
        now = time.monotonic()
        try:
            stop = read_stop(store)  # before the work, so that the last round sees all that was written before it
            if now >= due_work or stop is not None:
                due_work = now + interval_seconds
                work()
            if now >= due_beat or stop is not None:
                due_beat = now + HEARTBEAT_SECONDS
                write_heartbeat(store, process, progress())
            if now >= due_flush or stop is not None:
                due_flush = now + FLUSH_SECONDS
                metrics.flush()
            last_good = time.monotonic()
            if stop is not None:
                return
        except StoreError:
            if time.monotonic() - last_good > MAX_STORE_FAILURE_SECONDS:
                raise
        if interrupted.is_set():
            metrics.flush()
            raise Interrupted(f"{process}: interrupted before the run was over; the next attempt goes on")
        interrupted.wait(max(0.02, min(due_work, due_beat) - time.monotonic()))

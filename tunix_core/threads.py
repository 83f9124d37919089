"""Threads that report their failures: none dies unseen, none keeps the process alive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tunix_core.errors import StoreError

_FIRST_RETRY_SECONDS = 0.2
_LAST_RETRY_SECONDS = 5.0


class Worker:
    """Runs `body(stop)` in a daemon thread; `check` raises in the caller what it raised."""

    def __init__(self, name: str, body: Callable[[threading.Event], None]) -> None:
        self._body = body
        self._error: BaseException | None = None
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        try:
            self._body(self.stopping)
        except BaseException as error:
            self._error = error

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raises the thread's exception."""
        if self._error is not None:
            raise self._error

    def stop(self, timeout_seconds: float | None = 30.0) -> None:
        """Ask it to end and wait; None: however long it takes."""
        self.stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)


def with_retries(job: Callable[[], None], stop: threading.Event, max_seconds: float = 120.0) -> None:
    """Repeat `job` while the store fails, with growing pauses.

    Raises:
        StoreError: it still failed after `max_seconds`, or the process is about to end.
    """
    pause, started = _FIRST_RETRY_SECONDS, time.monotonic()
    while True:
        try:
            return job()
        except StoreError as error:
            if not error.retryable or time.monotonic() - started > max_seconds or stop.wait(pause):
                raise
            pause = min(2 * pause, _LAST_RETRY_SECONDS)


class LatestJob:
    """Does jobs one after another in the background; a job that has not begun gives way to a newer one."""

    def __init__(self, name: str, *, keep_all: bool = False) -> None:
        """
        Args:
            keep_all: `submit` waits until the job before has begun; for jobs that several processes do together.
        """
        self._keep_all = keep_all
        self._condition = threading.Condition()
        self._job: Callable[[], None] | None = None
        self._busy = False
        self.num_skipped = 0
        self._worker = Worker(name, self._run)
        self._worker.start()

    def submit(self, job: Callable[[], None]) -> None:
        with self._condition:
            while self._keep_all and self._job is not None:
                self.check()
                self._condition.wait(0.1)
            self.num_skipped += self._job is not None
            self._job = job
            self._condition.notify_all()

    def check(self) -> None:
        """Raises what a job raised."""
        self._worker.check()

    def finish(self) -> None:
        """Wait until everything submitted is done, then end the thread."""
        with self._condition:
            while (self._job is not None or self._busy) and self._worker._thread.is_alive():
                self._condition.wait(0.1)
        self._worker.stop()
        self._worker.check()

    def abandon(self) -> None:
        """End the thread without waiting: what is being written is finished while the process lasts."""
        self._worker.stopping.set()

    def _run(self, stop: threading.Event) -> None:
        while True:
            with self._condition:
                while self._job is None:
                    if stop.is_set():
                        return
                    self._condition.wait(0.2)
                job, self._job, self._busy = self._job, None, True
                self._condition.notify_all()
            try:
                with_retries(job, stop)
            finally:
                with self._condition:
                    self._busy = False
                    self._condition.notify_all()

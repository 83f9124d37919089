"""Threads that report their failures: none dies unseen, none keeps the process alive."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from tunix_core.errors import StoreError

T = TypeVar("T")

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


async def on_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Await a call on one of the loop's threads. Cancelled, the call goes on to its end unheard.

    Raises:
        RuntimeError: it raised what a future cannot carry, or what would end the loop.
    """
    return await asyncio.to_thread(_contained, functools.partial(function, *args, **kwargs))


def _contained(call: Callable[[], T]) -> T:
    try:
        return call()
    except (StopIteration, SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


class AbandonedCalls:
    """Counts calls that go on although nobody waits for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_now = 0
        self.num_ever = 0

    def add(self) -> None:
        with self._lock:
            self.num_now += 1
            self.num_ever += 1

    def remove(self) -> None:
        """One of them has ended after all."""
        with self._lock:
            self.num_now -= 1


class _Call(concurrent.futures.Future[Any]):
    """One call on a thread; cancelling it while it runs leaves it to itself."""

    def __init__(self, run: Callable[[], Any], abandoned: Callable[[_Call], None]) -> None:
        super().__init__()
        self.run = run
        self._abandoned = abandoned

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if not cancelled and self.running():
            self._abandoned(self)
        return cancelled


class AbandonableThreads(concurrent.futures.ThreadPoolExecutor):
    """Threads for calls that may never return: daemons that nobody waits for, neither here nor at the process's end.

    asyncio accepts only this base class for `asyncio.to_thread`; of its threads and its queue nothing is used.
    """

    def __init__(self, max_threads: int, abandoned: AbandonedCalls) -> None:
        super().__init__(max_workers=max_threads, thread_name_prefix="call")
        self._abandoned = abandoned
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._guard = threading.Lock()
        self._num_threads = 0
        self._left: set[_Call] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        call = _Call(functools.partial(fn, *args, **kwargs), self._abandon)
        self._calls.put(call)
        if not self._idle.acquire(blocking=False) and self._num_threads < self._max_workers:
            with self._guard:
                self._num_threads += 1
                name = f"{self._thread_name_prefix}-{self._num_threads}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        return call

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Idle threads end; those that are held up are not waited for, whatever the arguments."""
        del wait, cancel_futures
        for _ in range(self._num_threads):
            self._calls.put(None)

    def _abandon(self, call: _Call) -> None:
        with self._guard:
            if call not in self._left and call.running():
                self._left.add(call)
                self._abandoned.add()

    def _work(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                self._idle.release()
                call = self._calls.get()
            if call is None:
                return
            if not call.set_running_or_notify_cancel():
                continue
            try:
                result = call.run()
            except BaseException as error:
                call.set_exception(error)
            else:
                call.set_result(result)
            with self._guard:
                if call in self._left:
                    self._left.remove(call)
                    self._abandoned.remove()
            del call

"""What a sink is, and the thread that feeds all of them: slow or broken, none holds up the process it tells of."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from tunix_core.metrics import Scalar
from tunix_core.threads import Worker

_WAIT_SECONDS = 0.1


class MetricSink(Protocol):
    """Called from one thread. What it raises costs the sink, not the run."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Finite figures of a step; a step that a crash undid comes again."""

    def close(self) -> None:
        """Bring everything where it belongs."""


class SinkThread:
    """Opens, feeds and closes sinks on a thread of its own.

    Rows wait in a bounded queue; one that finds it full is dropped and counted. A sink that raises is dropped with a
    log line and counted; the others go on.
    """

    def __init__(
        self,
        openers: Mapping[str, Callable[[], MetricSink]],
        *,
        log: Callable[[str], None],
        capacity_rows: int = 1024,
        cleanup: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            openers: name -> what makes the sink; it may talk to a service, so it runs on the thread.
            cleanup: called once all sinks are closed.
        """
        self._openers = openers
        self._log = log
        self._cleanup = cleanup
        self._rows: queue.Queue[tuple[int, dict[str, float]]] = queue.Queue(capacity_rows)
        self._sinks: dict[str, MetricSink] = {}
        self.num_dropped_rows = 0
        self.num_dropped_sinks = 0
        self._worker = Worker("sinks", self._run)
        if openers:
            self._worker.start()

    def write(self, step: int, scalars: Mapping[str, Scalar]) -> None:
        """Hand over a row; returns at once. Texts and non-finite figures stay behind."""
        if not self._openers:
            return
        figures = {
            name: float(value)
            for name, value in scalars.items()
            if isinstance(value, bool | int | float) and math.isfinite(value)
        }
        try:
            self._rows.put_nowait((step, figures))
        except queue.Full:
            self.num_dropped_rows += 1

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Write what waits and close the sinks; what takes longer is dropped and counted."""
        if self._openers and not self._worker.stopping.is_set():
            self._worker.stop(timeout_seconds)
            dropped = self.num_dropped_rows
            with contextlib.suppress(queue.Empty):
                while True:
                    self._rows.get_nowait()
                    self.num_dropped_rows += 1
            if self.num_dropped_rows > dropped:
                self._log(f"metric sinks: {self.num_dropped_rows - dropped} rows not written after {timeout_seconds} s")

    def _run(self, stop: threading.Event) -> None:
        for name, opener in self._openers.items():
            with self._guarded(name):
                self._sinks[name] = opener()
        while True:
            try:
                step, figures = self._rows.get(timeout=_WAIT_SECONDS)
            except queue.Empty:
                if stop.is_set():
                    break
                continue
            for name, sink in list(self._sinks.items()):
                with self._guarded(name):
                    sink.write(step, figures)
        for name, sink in list(self._sinks.items()):
            with self._guarded(name):
                sink.close()
        if self._cleanup is not None:
            self._cleanup()

    @contextlib.contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._sinks.pop(name, None)
            self.num_dropped_sinks += 1
            self._log(f"metric sink {name}: dropped ({type(error).__name__}: {error})")

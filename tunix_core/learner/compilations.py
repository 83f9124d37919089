"""Counts XLA compilations through JAX's own monitoring; after warm-up there must be none."""

from __future__ import annotations

import threading
from typing import Any

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Counts from its construction on, in the whole process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._mark = 0
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        if event == _EVENT:
            with self._lock:
                self._count += 1
                self.seconds += duration

    def warmed_up(self) -> None:
        """From here on compilations are faults."""
        with self._lock:
            self._mark = self._count

    @property
    def total(self) -> int:
        return self._count

    @property
    def after_warmup(self) -> int:
        return self._count - self._mark

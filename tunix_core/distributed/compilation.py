"""XLA compilations: counted, since after warm-up there must be none, and cached across processes."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
CACHE_VARIABLE = "TUNIX_COMPILATION_CACHE"

QUICK_ON_CPU = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""`compiler_options` of what runs once on a CPU: a fraction of the time to compile, slower to run."""


def enable_compilation_cache() -> None:
    """Keep executables in `$TUNIX_COMPILATION_CACHE` (default `~/.cache/tunix-airflow/xla`); empty turns it off.

    A restarted process then warms up in a second instead of compiling for a minute.
    """
    folder = os.environ.get(CACHE_VARIABLE, str(Path.home() / ".cache" / "tunix-airflow" / "xla"))
    if not folder:
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


class CompilationCounter:
    """Counts from its construction on, in the whole process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._mark = 0
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _EVENT:
            with self._lock:
                self._count += 1
                self.seconds += duration_secs

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

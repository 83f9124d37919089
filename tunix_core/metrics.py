"""Scalars of one process over time, collected in memory; `storage.metrics_files` writes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from tunix_core.errors import DataError

Scalar = float | int | bool | str

TIME = "time"
"""The column of the moment of recording, seconds since the epoch."""


class MetricRecorder:
    """Rows of named scalars; any thread may record. Not every row has every name."""

    def __init__(self, process: str, *, clock: Callable[[], float] = time.time) -> None:
        self.process = process
        self._clock = clock
        self._lock = threading.Lock()
        self._rows: list[dict[str, Scalar]] = []

    def record(self, **scalars: object) -> None:
        """Add a row. Values are numbers (NumPy's and zero-dimensional arrays too), bools or texts.

        Raises:
            DataError: a value of another kind, or the reserved name `time`.
        """
        row: dict[str, Scalar] = {name: _scalar(name, value) for name, value in scalars.items()}
        if TIME in row:
            raise DataError(f"metric: received the name {TIME!r}, accepted any other: every row has its time")
        with self._lock:
            self._rows.append({TIME: float(self._clock()), **row})

    def drain(self) -> list[dict[str, Scalar]]:
        """Take the rows recorded since the last call."""
        with self._lock:
            rows, self._rows = self._rows, []
        return rows

    def restore(self, rows: list[dict[str, Scalar]]) -> None:
        """Put drained rows back in front: they could not be written."""
        with self._lock:
            self._rows[:0] = rows

    def __len__(self) -> int:
        with self._lock:
            return len(self._rows)


def _scalar(name: str, value: object) -> Scalar:
    if isinstance(value, bool | int | float | str):
        return value
    array = np.asarray(value)  # device arrays convert here
    if array.ndim == 0 and array.dtype.kind in "biuf":
        return array.item()
    if array.ndim == 0 and np.can_cast(array.dtype, np.float64):
        return float(array)  # bfloat16 and its kin
    raise DataError(f"metric {name}: received {value!r}, accepted a number, a bool or a text")

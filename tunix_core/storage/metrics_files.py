"""Metrics as Parquet, `metrics/<process>/<incarnation>-<sequence>.parquet`: one wide, nullable table per flush."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tunix_core import paths
from tunix_core.errors import CorruptObject, StoreError
from tunix_core.metrics import TIME, MetricRecorder, Scalar
from tunix_core.storage.store import ObjectStore, map_requests

_KINDS = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}


class MetricFiles:
    """Writes what one recorder collected; one per process and incarnation."""

    def __init__(self, store: ObjectStore, recorder: MetricRecorder, *, incarnation: str) -> None:
        self._store = store
        self._recorder = recorder
        self._incarnation = paths.name("incarnation", incarnation)
        paths.name("process", recorder.process)
        self._sequence = 0

    def flush(self) -> str | None:
        """Write the rows recorded since the last flush; returns the key, None where there were none.

        Raises:
            StoreError: the rows stay with the recorder, for the next flush.
        """
        rows = self._recorder.drain()
        if not rows:
            return None
        key = paths.metrics(self._recorder.process, f"{self._incarnation}-{self._sequence:08d}")
        try:
            # unconditional: a flush repeated after a lost answer replaces its first attempt
            self._store.put(key, _encode(rows))
        except StoreError:
            self._recorder.restore(rows)
            raise
        self._sequence += 1
        return key


class MetricReader:
    """Follows the metrics of one process; each poll costs only new files."""

    def __init__(self, store: ObjectStore, process: str) -> None:
        self._store = store
        self._prefix = paths.metrics(paths.name("process", process), "").removesuffix(".parquet")
        self._tables: dict[str, pa.Table] = {}

    def poll(self) -> dict[str, np.ndarray]:
        """All rows so far, by column, sorted by time.

        Numbers are float64 with NaN where a row lacks the name, int64 or bool where every row has it; texts
        are objects with None.
        """
        new = [key for key in self._store.list_after(self._prefix) if key not in self._tables]
        self._tables.update(zip(new, map_requests(self._store, self._read, new), strict=True))
        if not self._tables:
            return {}
        table = pa.concat_tables(self._tables.values(), promote_options="permissive").combine_chunks()
        table = table.take(np.argsort(table.column(TIME).to_numpy(), kind="stable"))
        return {name: _to_numpy(table.column(name)) for name in table.column_names}

    def _read(self, key: str) -> pa.Table:
        try:
            return pq.ParquetFile(pa.BufferReader(self._store.get(key))).read(use_threads=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise CorruptObject(f"{key}: no metrics file ({error})") from error


def read_metrics(store: ObjectStore, process: str) -> dict[str, np.ndarray]:
    """All metrics of a process, by column, sorted by time; empty before its first flush."""
    return MetricReader(store, process).poll()


def metric_processes(store: ObjectStore) -> list[str]:
    """Processes that have metrics."""
    return sorted({key.split("/")[1] for key in store.list_after(paths.METRICS)})


def _encode(rows: list[dict[str, Scalar]]) -> bytes:
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {}
    for name in names:
        kinds = {type(row[name]) for row in rows if name in row}
        # a name that is sometimes an int and sometimes a float is a float
        kind = kinds.pop() if len(kinds) == 1 else (str if str in kinds else float)
        columns[name] = pa.array([kind(row[name]) if name in row else None for row in rows], _KINDS[kind])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, compression="zstd", compression_level=1)
    return bytes(sink.getvalue())


def _to_numpy(column: pa.ChunkedArray) -> np.ndarray:
    if column.null_count and not pa.types.is_string(column.type):
        column = column.cast(pa.float64())
    return column.to_numpy(zero_copy_only=False)

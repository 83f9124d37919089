from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.stores import ScriptedStore
from tunix_core.errors import ConfigError, CorruptObject, DataError, StoreError
from tunix_core.metrics import MetricRecorder
from tunix_core.storage.metrics_files import MetricFiles, MetricReader, metric_processes, read_metrics
from tunix_core.storage.store import ObjectStore


class Ticks:
    def __init__(self, start: float = 0.0) -> None:
        self.now = start

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_rows_come_back_as_sorted_columns(store: ObjectStore) -> None:
    assert read_metrics(store, "learner") == {}
    recorder = MetricRecorder("learner", clock=Ticks(100))
    late = MetricFiles(store, recorder, incarnation="inc1")
    recorder.record(clock=3, loss=0.5, warm=True, state="stepping")
    recorder.record(clock=np.int32(4), loss=np.float32(0.25), skipped=1)
    assert late.flush() == "metrics/learner/inc1-00000000.parquet"
    assert late.flush() is None
    earlier = MetricRecorder("learner", clock=Ticks())
    earlier.record(clock=1, loss=2, entropy=math.nan)
    MetricFiles(store, earlier, incarnation="inc2").flush()
    columns = read_metrics(store, "learner")
    assert columns["time"].tolist() == [1.0, 101.0, 102.0]
    assert columns["clock"].tolist() == [1, 3, 4]
    assert columns["clock"].dtype == np.int64
    np.testing.assert_array_equal(columns["loss"], [2.0, 0.5, 0.25])
    np.testing.assert_array_equal(columns["skipped"], [np.nan, np.nan, 1.0])
    np.testing.assert_array_equal(columns["warm"], [np.nan, 1.0, np.nan])
    np.testing.assert_array_equal(columns["entropy"], [np.nan] * 3)
    assert columns["state"].tolist() == [None, "stepping", None]
    assert metric_processes(store) == ["learner"]


def test_a_failed_flush_loses_nothing(memory: ObjectStore) -> None:
    store = ScriptedStore(memory)
    recorder = MetricRecorder("actor-0-0", clock=Ticks())
    files = MetricFiles(store, recorder, incarnation="inc0")
    for action in ("fail", "lose"):
        recorder.record(x=1)
        store.script = lambda verb, _key, action=action: action if verb == "put" else "pass"
        with pytest.raises(StoreError):
            files.flush()
    store.script = lambda _verb, _key: "pass"
    recorder.record(x=2)
    files.flush()
    assert read_metrics(memory, "actor-0-0")["x"].tolist() == [1, 1, 2]


def test_a_reader_reads_only_new_files(memory: ObjectStore) -> None:
    store = ScriptedStore(memory)
    recorder = MetricRecorder("learner", clock=Ticks())
    files = MetricFiles(memory, recorder, incarnation="inc0")
    reader = MetricReader(store, "learner")
    for i in range(4):
        recorder.record(i=i)
        files.flush()
        store.calls.clear()
        assert reader.poll()["i"].tolist() == list(range(i + 1))
        assert [verb for verb, _ in store.calls] == ["list_after", "get"]


def test_processes_with_a_common_beginning_are_apart(memory: ObjectStore) -> None:
    for process in ("actor-0-1", "actor-0-10"):
        recorder = MetricRecorder(process)
        recorder.record(x=1)
        MetricFiles(memory, recorder, incarnation="inc0").flush()
    assert len(read_metrics(memory, "actor-0-1")["x"]) == 1


def test_any_thread_may_record(memory: ObjectStore) -> None:
    recorder = MetricRecorder("learner")
    files = MetricFiles(memory, recorder, incarnation="inc0")

    def work(index: int) -> None:
        for i in range(50):
            recorder.record(x=index * 50 + i)

    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(work, range(8)):
            files.flush()
    files.flush()
    assert sorted(read_metrics(memory, "learner")["x"]) == list(range(400))
    assert len(recorder) == 0


def test_bad_values_and_names(memory: ObjectStore) -> None:
    recorder = MetricRecorder("learner")
    for value in (None, [1, 2], np.zeros(2), {}, 1j):
        with pytest.raises(DataError, match="metric x"):
            recorder.record(x=value)
    with pytest.raises(DataError, match="time"):
        recorder.record(time=1.0)
    assert len(recorder) == 0
    with pytest.raises(ConfigError):
        MetricFiles(memory, MetricRecorder("../x"), incarnation="inc0")
    memory.put("metrics/learner/inc0-00000000.parquet", b"garbage")
    with pytest.raises(CorruptObject, match="inc0-00000000"):
        read_metrics(memory, "learner")

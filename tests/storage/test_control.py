from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tunix_core import paths
from tunix_core.errors import ConfigError, CorruptObject, ObjectExists, VersionConflict
from tunix_core.storage import control
from tunix_core.storage.control import LearnerSignal, ProcessRecord
from tunix_core.storage.store import ObjectStore, read_json, write_json


def test_the_first_stop_stands(store: ObjectStore) -> None:
    assert control.read_stop(store) is None
    first = control.request_stop(store, reason="completed", source="learner", failed=False)
    assert control.request_stop(store, reason="late", source="actor-0-0", failed=True) == first
    assert control.read_stop(store) == first
    assert (first.reason, first.source, first.failed) == ("completed", "learner", False)


def test_racing_stops_agree(store: ObjectStore) -> None:
    barrier = threading.Barrier(8)

    def stop(index: int) -> control.StopRequest:
        barrier.wait()
        return control.request_stop(store, reason=f"r{index}", source=f"p{index}", failed=True)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(stop, range(8)))) == 1


SIGNAL = LearnerSignal(
    clock=7,
    published_version=6,
    step_seconds=0.5,
    cursors={"inc0": 3},
    live_incarnations=["inc1", "inc0"],
    capacity_groups=12,
    target=2,
    state="waiting",
    learner_incarnation="l0",
    updated_at=1.5,
)


def test_the_learners_signal(store: ObjectStore) -> None:
    assert control.read_learner_signal(store) is None
    control.write_learner_signal(store, SIGNAL)
    assert control.read_learner_signal(store) == SIGNAL


def test_signals_of_newer_and_broken_writers(memory: ObjectStore) -> None:
    control.write_learner_signal(memory, SIGNAL)
    value = read_json(memory, paths.LEARNER_SIGNAL)
    write_json(memory, paths.LEARNER_SIGNAL, {**value, "added_later": 1})
    assert control.read_learner_signal(memory) == SIGNAL
    del value["clock"]
    write_json(memory, paths.LEARNER_SIGNAL, value)
    with pytest.raises(CorruptObject, match="clock"):
        control.read_learner_signal(memory)


def test_heartbeats(store: ObjectStore) -> None:
    assert control.read_heartbeats(store) == {}
    assert control.read_heartbeat(store, "learner") is None
    progress = {"clock": np.int64(3), "loss": math.nan, "rates": np.array([1.0, math.inf]), "nested": {"x": np.True_}}
    control.write_heartbeat(store, "learner", progress, clock=lambda: 5.0)
    control.write_heartbeat(store, "actor-0-0", {}, clock=lambda: 6.0)
    control.write_heartbeat(store, "actor-0-0", {"groups": 2}, clock=lambda: 7.0)
    beats = control.read_heartbeats(store)
    assert set(beats) == {"learner", "actor-0-0"}
    assert beats["learner"].progress == {"clock": 3, "loss": None, "rates": [1.0, None], "nested": {"x": True}}
    assert (beats["actor-0-0"].updated_at, beats["actor-0-0"].progress) == (7.0, {"groups": 2})
    assert control.read_heartbeat(store, "learner") == beats["learner"]
    with pytest.raises(ConfigError, match="process"):
        control.write_heartbeat(store, "../x", {})


RECORD = ProcessRecord(
    process="learner",
    submission_key="dag-run-learner-1",
    attempt=1,
    host="h",
    boot_id="b",
    pid=12,
    pid_start=3.5,
    state="starting",
)


def test_process_records_change_by_compare_and_swap(store: ObjectStore) -> None:
    assert control.read_process(store, "learner") is None
    control.create_process(store, RECORD)
    with pytest.raises(ObjectExists):
        control.create_process(store, RECORD)
    found = control.read_process(store, "learner")
    assert found is not None
    record, version = found
    assert record.updated_at > 0
    assert (record.submission_key, record.pid, record.state, record.exit_code) == (
        "dag-run-learner-1",
        12,
        "starting",
        None,
    )
    control.replace_process(store, RECORD, version)
    with pytest.raises(VersionConflict):
        control.replace_process(store, RECORD, version)
    assert set(control.read_processes(store)) == {"learner"}


def test_updating_a_process_record(memory: ObjectStore) -> None:
    assert control.update_process(memory, "learner", lambda record: record) is None
    created = control.update_process(memory, "learner", lambda record: RECORD if record is None else None)
    assert created is not None
    assert control.update_process(memory, "learner", lambda _: None) == created
    with pytest.raises(ConfigError, match="process"):
        control.read_process(memory, "a/b")

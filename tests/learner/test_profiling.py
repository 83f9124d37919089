"""Traces on demand, in a real learner: the file is there, an id runs once, no later life runs it again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.learner.support import NumpyTrainer, make_config, make_learner, open_run, write_shards
from tunix_core import paths
from tunix_core.errors import ConfigError, Interrupted
from tunix_core.learner.loop import Learner
from tunix_core.learner.profiling import StepProfiler
from tunix_core.storage import multifile
from tunix_core.storage.control import claim_profile, read_profile_request, request_profile
from tunix_core.storage.store import ObjectStore, write_json

STEP_SECONDS = 0.05
BUSY = {"learner.num_steps": 40, "staleness.max_staleness": 60}


def manifest(store: ObjectStore, name: str) -> dict[str, Any]:
    return multifile.read_manifest(store, paths.profile(name))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def complete(store: ObjectStore, name: str) -> Callable[[], bool]:
    return lambda: store.exists(paths.profile(name) + paths.MANIFEST)


@contextmanager
def running(learner: Learner, *, ended: threading.Event) -> Iterator[None]:
    """The learner on a thread until the block is left."""

    def run() -> None:
        with pytest.raises(Interrupted):
            learner.run()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def start(store: ObjectStore, lines: list[str], **kwargs: Any) -> tuple[Learner, threading.Event]:
    ended = threading.Event()
    trainer = NumpyTrainer(step_seconds=STEP_SECONDS)
    config = make_config(**BUSY)
    return make_learner(store, config, trainer=trainer, interrupted=ended.is_set, log=lines.append, **kwargs), ended


def test_a_running_learner_traces_the_next_steps_once(tmp_path: Path) -> None:
    store, lines = open_run(tmp_path), []
    write_shards(store, 60)
    learner, ended = start(store, lines)
    with running(learner, ended=ended):
        wait_for(lambda: learner.clock >= 2)
        request_profile(store, id="first", steps=3)
        wait_for(complete(store, "first"))
        request_profile(store, id="first", steps=3)
        clock = learner.clock
        wait_for(lambda: learner.clock >= clock + 6)
        assert learner.progress()["profile"] == "", "not again"
    found = manifest(store, "first")
    assert (found["num_steps"], found["incarnation"]) == (3, "l0")
    assert found["first_clock"] >= 3
    (trace,) = [name for name in found["files"] if name.endswith(".xplane.pb")]
    assert len(multifile.read_file(store, found, trace)) > 1000
    assert len([line for line in lines if line.startswith("trace of 3 steps")]) == 1

    # A life later, on the same run: the request still stands, and nothing happens.
    again, ended = start(store, lines, incarnation="l1")
    before = store.list_after(paths.PROFILES)
    with running(again, ended=ended):
        resumed = again.clock
        wait_for(lambda: again.clock >= resumed + 4)
    assert store.list_after(paths.PROFILES) == before
    assert again.progress()["num_profile_failures"] == 0


def test_a_trace_that_the_end_of_the_run_cuts_short_is_kept(tmp_path: Path) -> None:
    store, lines = open_run(tmp_path), []
    write_shards(store, 60)
    request_profile(store, id="long", steps=100)
    learner, ended = start(store, lines)
    with running(learner, ended=ended):
        wait_for(lambda: learner.clock >= 4)
    assert 1 <= manifest(store, "long")["num_steps"] < 100


def test_a_failing_profiler_costs_the_trace_only(tmp_path: Path) -> None:
    store, lines = open_run(tmp_path), []
    write_shards(store, 60)
    request_profile(store, id="second", steps=1)
    learner, ended = start(store, lines)
    jax.profiler.start_trace(str(tmp_path / "someone-elses"))
    try:
        with running(learner, ended=ended):
            wait_for(lambda: learner.clock >= 4)
    finally:
        jax.profiler.stop_trace()
    assert learner.progress()["num_profile_failures"] == 1
    assert [line for line in lines if line.startswith("trace second: not started")]
    assert not complete(store, "second")()


@pytest.mark.parametrize("steps", [0, -1, 101, 2.5, True])
def test_an_unreasonable_number_of_steps_is_refused(tmp_path: Path, steps: Any) -> None:
    store = open_run(tmp_path)
    with pytest.raises(ConfigError, match="accepted 1 to 100"):
        request_profile(store, id="x", steps=steps)
    with pytest.raises(ConfigError, match="accepted 1 to 128 of a-z"):
        request_profile(store, id="../x", steps=1)
    assert read_profile_request(store) is None


def test_a_bad_request_is_logged_once_and_a_good_one_after_it_is_met(tmp_path: Path) -> None:
    store, lines = open_run(tmp_path), []
    profiler = StepProfiler(store, incarnation="l0", log=lines.append)
    for bad in ({"id": "a", "steps": 1_000_000, "requested_at": 0.0}, {"id": "../a", "steps": 1}, {"steps": 1}):
        write_json(store, paths.PROFILE_REQUEST, bad)
        profiler.poll()
        profiler.poll()
    assert len(lines) == profiler.num_failures == 3
    assert store.list_after(paths.PROFILES) == []
    request_profile(store, id="good", steps=1)
    profiler.poll()
    assert profiler.current == "good"


class CountingStore:
    """Counts the create-only writes that it passes on."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.num_writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put_if_absent(self, key: str, data: bytes) -> Any:
        self.num_writes += 1
        return self._store.put_if_absent(key, data)


def test_a_request_that_was_met_costs_one_write_for_good(tmp_path: Path) -> None:
    store: Any = CountingStore(open_run(tmp_path))
    standing = request_profile(store, id="done", steps=1)
    claim_profile(store, standing, incarnation="earlier")
    store.num_writes = 0
    profiler = StepProfiler(store, incarnation="l0", log=print)
    for _ in range(5):
        profiler.poll()
    assert (profiler.current, store.num_writes) == ("", 1)


def test_a_newer_request_stands_and_an_id_is_claimed_once(tmp_path: Path) -> None:
    store = open_run(tmp_path)
    first = request_profile(store, id="a", steps=1)
    assert request_profile(store, id="a", steps=7) == first
    second = request_profile(store, id="b", steps=2)
    assert read_profile_request(store) == second
    assert claim_profile(store, second, incarnation="l0")
    assert not claim_profile(store, second, incarnation="l1")

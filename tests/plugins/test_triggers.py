"""The trigger against records written by hand."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from airflow.sdk.module_loading import import_string

from plugins.triggers import ProcessTrigger
from tests.support.processes import running_record
from tunix_core.errors import StoreError
from tunix_core.storage import control
from tunix_core.storage.control import ProcessRecord
from tunix_core.storage.store import ObjectStore


@pytest.fixture
def record(store: ObjectStore) -> ProcessRecord:
    """A running `learner`: this very process."""
    record = running_record()
    control.create_process(store, record)
    return record


def make(store: ObjectStore, **changes: Any) -> ProcessTrigger:
    arguments = {"run_uri": store.uri, "process": "learner", "submission_key": "key", "attempt": 1, "ends_run": True}
    fast = {"heartbeats": ["learner"], "poll_seconds": 0.01, "log_seconds": 0.0}
    return ProcessTrigger(**{**arguments, **fast, **changes})


def change(store: ObjectStore, **fields: Any) -> None:
    control.update_process(store, "learner", lambda record: record and dataclasses.replace(record, **fields))


async def fire(trigger: ProcessTrigger, timeout_seconds: float = 10) -> dict[str, Any]:
    async with asyncio.timeout(timeout_seconds):
        return (await anext(trigger.run())).payload


def test_it_survives_serialisation(store: ObjectStore) -> None:
    path, arguments = make(store, heartbeats=["a", "b"]).serialize()
    again = import_string(path)(**arguments)
    assert again.serialize() == (path, arguments)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"state": "exited", "exit_code": 0, "reason": "completed"}, ("succeeded", 0)),
        ({"state": "exited", "exit_code": 76, "reason": "diverged"}, ("failed", 76)),
        ({"pid_start": 1}, ("lost", None)),  # the pid is another process's
        ({"boot_id": "before the reboot", "attempt": 2}, ("superseded", None)),
        ({"submission_key": "other"}, ("superseded", None)),
    ],
)
def test_it_says_how_the_process_ended(
    store: ObjectStore,
    record: ProcessRecord,  # noqa: ARG001
    fields: dict[str, Any],
    expected: tuple[str, int | None],
) -> None:
    change(store, **fields)
    event = asyncio.run(fire(make(store)))
    assert (event["state"], event["exit_code"]) == expected
    assert event["reason"]


def test_it_waits_while_the_process_runs(store: ObjectStore, record: ProcessRecord) -> None:  # noqa: ARG001
    async def scenario() -> dict[str, Any]:
        waiting = asyncio.create_task(fire(make(store)))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await asyncio.to_thread(change, store, state="exited", exit_code=0)
        return await waiting

    assert asyncio.run(scenario())["state"] == "succeeded"


def test_a_store_out_of_reach_is_no_news(
    store: ObjectStore,
    record: ProcessRecord,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change(store, state="exited", exit_code=0)
    trigger, real, calls = make(store), ProcessTrigger._look, []

    def flaky(self: ProcessTrigger, observer: Any) -> Any:
        calls.append(1)
        if len(calls) < 4:
            raise StoreError("503")
        return real(self, observer)

    monkeypatch.setattr(ProcessTrigger, "_look", flaky)
    assert asyncio.run(fire(trigger))["state"] == "succeeded"
    assert len(calls) == 4


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, text: str, *values: Any) -> None:
        self.lines.append(text % values)

    warning = info


def test_progress_is_logged_when_it_changes(store: ObjectStore) -> None:
    trigger = make(store, heartbeats=["actor-0-0", "actor-0-1"])
    trigger._log = log = Log()  # what LoggingMixin caches
    seen: dict[str, str] = {}
    control.write_heartbeat(store, "actor-0-0", {"clock": 41, "num_steps": 90, "mean_reward": 0.6311, "other": None})
    trigger._log_progress(store, seen)
    trigger._log_progress(store, seen)
    assert log.lines == ["actor-0-0: step 41/90 reward 0.631"]


@pytest.mark.parametrize(
    ("state", "stopped", "stop"),
    [
        ("deferred", False, None),  # another triggerer took it over
        ("failed", True, True),
        ("success", True, False),
        (None, True, None),  # cleared: the next attempt comes, the run goes on
    ],
)
def test_on_kill_stops_only_what_airflow_has_given_up(
    store: ObjectStore,
    record: ProcessRecord,
    monkeypatch: pytest.MonkeyPatch,
    state: str | None,
    stopped: bool,
    stop: bool | None,
) -> None:
    change(store, host="elsewhere")  # so that it is stopped through its record, not by a signal to this test
    trigger = make(store)
    monkeypatch.setattr(trigger, "_task_state", lambda: state)
    asyncio.run(trigger.on_kill())
    found = control.read_process(store, record.process)
    assert (found[0].state == "exited") == stopped
    request = control.read_stop(store)
    assert (None if request is None else request.failed) == stop


def test_on_kill_stops_nothing_without_an_answer(store: ObjectStore, record: ProcessRecord) -> None:
    trigger = make(store)  # belongs to no task instance, so there is no one to ask
    asyncio.run(trigger.on_kill())
    assert control.read_process(store, record.process)[0].state == "running"
    assert control.read_stop(store) is None


@pytest.mark.parametrize(
    ("states", "asked", "event"),
    [
        ({"learner": "failed", "sync_weights": "deferred"}, None, True),
        ({"learner": "success", "sync_weights": "deferred"}, None, False),
        ({"learner": "success", "sync_weights": "deferred"}, False, None),  # the ordinary end
        ({"learner": "up_for_retry", "sync_weights": None}, None, None),
        ({"learner": "deferred", "actors_0": "failed", "actors_1": "running"}, None, None),
        ({"learner": "deferred", "actors_0": "failed", "actors_1": "failed"}, None, True),
        (None, None, None),  # Airflow does not answer
    ],
)
def test_a_sibling_that_went_without_a_word_ends_the_waiting(
    store: ObjectStore,
    record: ProcessRecord,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
    states: dict[str, str | None] | None,
    asked: bool | None,
    event: bool | None,
) -> None:
    def answer(_: list[str]) -> dict[str, str | None]:
        if states is None:
            raise ConnectionError("silence")
        return states

    if asked is not None:
        control.request_stop(store, reason="completed", source="learner", failed=asked)
    trigger = make(store, siblings=["learner", "actors", "sync_weights"], sibling_seconds=0.0)
    monkeypatch.setattr(trigger, "_task_states", answer)
    if event is None:
        with pytest.raises(TimeoutError):
            asyncio.run(fire(trigger, 0.3))
    else:
        fired = asyncio.run(fire(trigger))
        assert (fired["state"], fired["failed"]) == ("abandoned", event)

"""Records of processes: what may be concluded from them, and who may change them."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from tests.support.processes import running_record
from tunix_core.errors import Fenced
from tunix_core.storage import control, process_table
from tunix_core.storage.process_table import ProcessObserver, StillRunning, claim, publish, stop_process, stop_run
from tunix_core.storage.store import ObjectStore, open_store


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "run"))


def test_a_first_claim_and_its_takeover(store: ObjectStore) -> None:
    taken = claim(store, "learner", "key")
    assert taken.new
    assert (taken.record.attempt, taken.record.state) == (1, "starting")
    publish(store, dataclasses.replace(taken.record, state="running"))
    again = claim(store, "learner", "key")
    assert not again.new
    assert again.record.attempt == 1


def test_one_of_many_claimers_wins(store: ObjectStore) -> None:
    control.create_process(store, running_record(state="exited", exit_code=1))
    won = []

    def race(number: int) -> None:
        try:
            if claim(store, "learner", f"key{number}", stale_seconds=0.5).new:
                won.append(number)
        except StillRunning:
            pass

    threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won
    attempts = control.read_process(store, "learner")[0].attempt
    assert attempts == 1 + len(won)  # a claim is lost to none or followed by a later attempt, never shared


def test_a_running_process_of_another_submission_is_not_claimed(store: ObjectStore) -> None:
    control.create_process(store, running_record())
    with pytest.raises(StillRunning, match="'key'"):
        claim(store, "learner", "other")


def test_a_failed_attempt_is_followed_by_the_next(store: ObjectStore) -> None:
    control.create_process(store, running_record(state="exited", exit_code=1))
    assert claim(store, "learner", "key").record.attempt == 2


def test_on_this_host_the_pid_decides_at_once(store: ObjectStore) -> None:
    control.create_process(store, running_record(pid_start=1))
    assert ProcessObserver(store, "learner", stale_seconds=1000).status().state == "lost"
    assert ProcessObserver(store, "absent").status().state == "absent"


def test_on_another_host_only_a_record_that_stands_still_is_lost(store: ObjectStore) -> None:
    control.create_process(store, running_record(host="elsewhere"))
    observer = ProcessObserver(store, "learner", stale_seconds=0.2)
    assert observer.status().state == "running"
    control.update_process(store, "learner", lambda r: r)  # renewed, whatever its clock says
    threading.Event().wait(0.25)
    assert observer.status().state == "running"
    threading.Event().wait(0.25)
    assert observer.status().state == "lost"
    assert claim(store, "learner", "key", stale_seconds=0.1).record.attempt == 2


def test_only_the_recorded_attempt_may_publish(store: ObjectStore) -> None:
    control.create_process(store, running_record(attempt=2))
    with pytest.raises(Fenced, match="superseded"):
        publish(store, running_record(attempt=1))
    process_table.end(store, running_record(attempt=2), "stopped")
    with pytest.raises(Fenced, match="was ended: stopped"):
        publish(store, running_record(attempt=2))


def test_stopping_elsewhere_ends_the_record_of_that_submission_only(store: ObjectStore) -> None:
    control.create_process(store, running_record(host="elsewhere"))
    assert not stop_process(store, "learner", reason="x", submission_key="other")
    assert stop_process(store, "learner", reason="x", submission_key="key")
    assert not stop_process(store, "learner", reason="x")
    ended = control.read_process(store, "learner")[0]
    assert (ended.state, ended.exit_code, ended.reason) == ("exited", -9, "x")


def test_a_run_with_nothing_left_gets_no_stop_request(store: ObjectStore) -> None:
    control.create_process(store, running_record(state="exited", exit_code=0))
    control.create_process(store, running_record(process="actor-0", pid_start=1))
    assert stop_run(store, reason="x", source="test") == {}
    assert control.read_stop(store) is None

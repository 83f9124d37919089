"""Which processes may be ended when a service starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunix_core.config_loading import load_recipe
from tunix_core.console.airflow_client import AirflowClient, AirflowError
from tunix_core.console.reaper import reap_ended_runs, runs_with_processes
from tunix_core.storage import control
from tunix_core.storage.control import ProcessRecord
from tunix_core.storage.run_directory import create_run
from tunix_core.storage.store import ObjectStore, open_store


class Airflow(AirflowClient):
    """Knows the state of one run, or fails."""

    def __init__(self, answer: str | AirflowError) -> None:
        super().__init__("http://127.0.0.1:1", "", "")
        self.answer = answer

    def state(self, dag_id: str, run_id: str) -> str:
        assert (dag_id, run_id) == ("post_training", "manual__1")
        if isinstance(self.answer, AirflowError):
            raise self.answer
        return self.answer


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """A run whose learner works on another host."""
    store = open_store(str(tmp_path / "run"))
    create_run(store, load_recipe("lookup"), run_id="manual__1", extra={"dag_id": "post_training"})
    learner = ProcessRecord(
        process="learner",
        submission_key="k",
        attempt=1,
        host="elsewhere",
        boot_id="b",
        pid=1,
        pid_start=1,
        state="running",
    )
    control.create_process(store, learner)
    return store


@pytest.mark.parametrize(
    ("answer", "reaped"),
    [
        ("running", False),
        ("queued", False),
        ("failed", True),
        ("success", True),
        (AirflowError("no such run", 404), True),
        (AirflowError("no answer", 0), False),
        (AirflowError("broken", 500), False),
    ],
)
def test_only_what_airflow_says_is_over_is_ended(
    store: ObjectStore, tmp_path: Path, answer: str | AirflowError, reaped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []
    monkeypatch.setattr(
        "tunix_core.console.reaper.process_table.stop_run", lambda s, **_: stopped.append(s.uri) or {"learner": "x"}
    )
    result = reap_ended_runs([str(tmp_path)], Airflow(answer))
    assert stopped == ([store.uri] if reaped else [])
    assert bool(result) == reaped


def test_a_run_without_processes_asks_no_one(store: ObjectStore, tmp_path: Path) -> None:
    assert runs_with_processes([str(tmp_path)]) == [store.uri]
    control.update_process(
        store, "learner", lambda r: r and ProcessRecord(**{**vars(r), "state": "exited", "exit_code": 0})
    )
    assert runs_with_processes([str(tmp_path)]) == []
    assert reap_ended_runs([str(tmp_path)], Airflow(AssertionError)) == {}  # type: ignore[arg-type]  # never asked

"""Submissions with real supervisors on a local store."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plugins.launchers import LaunchSpec, LocalLauncher, child_environment
from tunix_core.errors import EXIT_DIVERGED, ConfigError, StoreError
from tunix_core.processes import wait_until
from tunix_core.storage import control, process_table
from tunix_core.storage.store import ObjectStore


@pytest.fixture
def spec(store: ObjectStore) -> Iterator[LaunchSpec]:
    yield LaunchSpec(run_uri=store.uri, process="learner", submission_key="g0", module="tasks.run_learner")
    process_table.stop_run(store, reason="test is over", source="test", voluntary_seconds=0)


def wait_for_end(store: ObjectStore, process: str = "learner") -> process_table.ProcessStatus:
    observer = process_table.ProcessObserver(store, process)
    assert wait_until(lambda: observer.status().state != "running", 120)
    return observer.status()


def test_a_submission_is_attached_to_while_it_runs_and_found_done_after(
    store: ObjectStore, spec: LaunchSpec, script: Callable[..., None]
) -> None:
    script(learner={"waits": True})
    first = LocalLauncher().submit(spec)
    again = LocalLauncher().submit(spec)
    assert first.started
    assert not again.started
    assert (again.record.attempt, again.record.state) == (1, "running")
    control.request_stop(store, reason="completed", source="test", failed=False)
    assert wait_for_end(store).state == "succeeded"
    done = LocalLauncher().submit(spec)
    assert not done.started
    assert done.record.state == "exited"


def test_a_failed_submission_gets_a_new_attempt(
    store: ObjectStore, spec: LaunchSpec, script: Callable[..., None]
) -> None:
    script(learner={"crash_at": {"1": [1, EXIT_DIVERGED]}})
    LocalLauncher().submit(spec)
    assert wait_for_end(store).exit_code == EXIT_DIVERGED
    second = LocalLauncher().submit(spec)
    assert second.started
    assert second.record.attempt == 2
    assert wait_for_end(store).state == "succeeded"


def test_another_submission_replaces_a_running_one(
    store: ObjectStore, spec: LaunchSpec, script: Callable[..., None]
) -> None:
    script(learner={"waits": True})
    LocalLauncher().submit(spec)
    old = control.read_process(store, "learner")[0]
    replacement = LocalLauncher().submit(dataclasses.replace(spec, submission_key="g1"))
    assert replacement.started
    assert not process_table.identity(old).is_alive()
    assert control.read_process(store, "learner")[0].submission_key == "g1"


def test_a_supervisor_that_cannot_start_is_an_error_and_no_running_process(
    store: ObjectStore, spec: LaunchSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Found before the real one, whether that is in a checkout or installed.
    (tmp_path / "broken" / "tasks").mkdir(parents=True)
    (tmp_path / "broken" / "tasks" / "__init__.py").touch()
    (tmp_path / "broken" / "tasks" / "supervise.py").write_text("raise SystemExit('no supervisor here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    monkeypatch.chdir("/")
    with pytest.raises(StoreError, match="ended before it took over"):
        LocalLauncher().submit(spec)
    assert process_table.ProcessObserver(store, "learner").status().state == "failed"


def test_runs_outside_the_roots_are_refused(spec: LaunchSpec, tmp_path: object) -> None:
    with pytest.raises(ConfigError, match="under one of"):
        LocalLauncher().submit(dataclasses.replace(spec, run_uri=f"file://{tmp_path}/elsewhere"))


def test_airflows_secrets_stay_with_airflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", "x")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    environment = child_environment()
    assert not [key for key in environment if "AIRFLOW" in key]
    assert environment["STORAGE_EMULATOR_HOST"] == os.environ["STORAGE_EMULATOR_HOST"]

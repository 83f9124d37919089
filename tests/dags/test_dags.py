"""The DAG files as Airflow sees them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import ParamValidationError

DAGS = Path(__file__).parents[2] / "dags"


@pytest.fixture(scope="module")
def dags() -> dict[str, Any]:
    from airflow.dag_processing.dagbag import DagBag

    patch = pytest.MonkeyPatch()
    patch.setenv("TUNIX_STORE_ROOTS", "file:///tmp/first,gs://bucket/second")
    patch.delenv("TUNIX_POST_TRAINING_SCHEDULE", raising=False)
    try:
        bag = DagBag(str(DAGS), bundle_name="tests")
    finally:
        patch.undo()
    assert bag.import_errors == {}
    return dict(bag.dags)


def test_every_dag_tells_an_operator_what_to_do(dags: dict[str, Any]) -> None:
    assert set(dags) == {"post_training", "evaluate_trajectories"}
    for dag in dags.values():
        assert "When it goes red" in dag.doc_md
        assert dag.tags


def test_the_shape_of_a_run(dags: dict[str, Any]) -> None:
    dag = dags["post_training"]
    components = {"learner", "actors", "sync_weights", "checkpoint"}
    tasks = {task.task_id: task for task in dag.tasks}
    for name in components:
        assert tasks[name].upstream_task_ids == {"prepare", "warm_start", "list_actors"}
        assert tasks[name].downstream_task_ids == {"finalize", "stop_processes"}
    assert tasks["prepare"].is_setup
    assert tasks["stop_processes"].is_teardown
    assert tasks["stop_processes"].on_failure_fail_dagrun
    assert tasks["actors"].is_mapped


def test_processes_come_back_after_a_kill(dags: dict[str, Any]) -> None:
    for name in ("learner", "sync_weights", "checkpoint"):
        task = dags["post_training"].get_task(name)
        assert task.retries == 3
        assert task.retry_delay.total_seconds() == 5


@pytest.mark.parametrize(
    ("params", "accepted"),
    [
        ({"num_steps": 5, "learning_rate": 1e-4}, True),
        ({"num_steps": None}, True),
        ({"store_root": "gs://bucket/second"}, True),
        ({"store_root": "gs://elsewhere"}, False),
        ({"recipe": "../../etc/passwd"}, False),
        ({"num_steps": 0}, False),
        ({"num_steps": "x"}, False),
        ({"learning_rate": 0}, False),
        ({"seed": -1}, False),
        ({"overrides": "learner.num_steps=1"}, False),
    ],
)
def test_the_form_refuses_what_the_configuration_would(
    dags: dict[str, Any], params: dict[str, Any], accepted: bool
) -> None:
    form = copy.deepcopy(dags["post_training"].params)

    def fill_in() -> None:
        form.update(params)
        form.validate()

    if accepted:
        fill_in()
    else:
        with pytest.raises((ParamValidationError, ValueError)):
            fill_in()


def test_hours_are_intervals(dags: dict[str, Any]) -> None:
    """A plain cron string would make every interval empty."""
    timetable = dags["evaluate_trajectories"].timetable
    assert type(timetable).__name__ == "CronDataIntervalTimetable"
    assert not dags["evaluate_trajectories"].catchup


def test_the_schedule_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.dag_processing.dagbag import DagBag

    monkeypatch.setenv("TUNIX_STORE_ROOTS", "/tmp/first")
    monkeypatch.setenv("TUNIX_POST_TRAINING_SCHEDULE", "0 3 * * *")
    bag = DagBag(str(DAGS / "post_training.py"), bundle_name="tests")
    assert bag.import_errors == {}
    assert bag.dags["post_training"].schedule == "0 3 * * *"

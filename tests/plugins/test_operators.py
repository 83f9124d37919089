"""The operator with scripted processes and a task instance made by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferralTimeout, TaskDeferred

from plugins.operators import ProcessOperator, submission_key
from plugins.triggers import ProcessTrigger
from tunix_core.config_loading import load_recipe
from tunix_core.errors import EXIT_CONFIG, EXIT_DIVERGED, EXIT_STORE
from tunix_core.storage import control, process_table
from tunix_core.storage.run_directory import create_run
from tunix_core.storage.store import ObjectStore, open_store


@dataclasses.dataclass
class TaskInstance:
    """What the operator asks of Airflow's."""

    task: Any
    states: dict[str, str] = dataclasses.field(default_factory=dict)
    dag_id: str = "post_training"
    run_id: str = "manual__1"
    task_id: str = "learner"
    map_index: int = -1
    try_number: int = 1
    max_tries: int = 3

    def get_task_states(self, **criteria: Any) -> dict[str, dict[str, str]]:
        assert criteria["run_ids"] == [self.run_id]
        return {self.run_id: self.states}


@pytest.fixture
def operator(store: ObjectStore) -> Iterator[ProcessOperator]:
    yield ProcessOperator(
        task_id="learner", run_uri=store.uri, process="learner", module="tasks.run_learner", retries=3
    )
    process_table.stop_run(store, reason="test is over", source="test", voluntary_seconds=0)


def context(operator: ProcessOperator, **fields: Any) -> dict[str, Any]:
    return {"ti": TaskInstance(task=operator, **fields)}


def ended(exit_code: int | None, state: str = "failed") -> dict[str, Any]:
    return {"state": state, "exit_code": exit_code, "reason": "because"}


def test_it_launches_and_defers(store: ObjectStore, operator: ProcessOperator, script: Callable[..., None]) -> None:
    script(learner={"waits": True})
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute(context(operator))
    trigger = deferred.value.trigger
    assert isinstance(trigger, ProcessTrigger)
    assert deferred.value.method_name == "resume"
    assert (trigger.run_uri, trigger.attempt, trigger.heartbeats) == (store.uri, 1, ["learner"])
    with pytest.raises(TaskDeferred) as again:
        operator.execute(context(operator, try_number=2))
    assert again.value.trigger.attempt == 1  # re-attached


def test_work_that_was_done_meanwhile_is_not_done_again(
    store: ObjectStore, operator: ProcessOperator, script: Callable[..., None]
) -> None:
    script(learner={"seconds": 0.1})
    with pytest.raises(TaskDeferred):
        operator.execute(context(operator))
    observer = process_table.ProcessObserver(store, "learner")
    assert process_table.wait_until(lambda: observer.status().state == "succeeded", 120)
    assert operator.execute(context(operator, try_number=2))["process"] == "learner"


def test_keys_are_kept_by_retries_and_changed_by_clears(operator: ProcessOperator) -> None:
    first = submission_key(TaskInstance(task=operator, try_number=1, max_tries=3))
    retry = submission_key(TaskInstance(task=operator, try_number=2, max_tries=3))
    cleared = submission_key(TaskInstance(task=operator, try_number=3, max_tries=5))  # cleared after two tries
    assert first == retry
    assert cleared != first
    assert submission_key(TaskInstance(task=operator, map_index=1)) != first


@pytest.mark.parametrize(
    ("exit_code", "try_number", "error", "stops_run"),
    [
        (-9, 1, AirflowException, False),
        (EXIT_STORE, 3, AirflowException, False),
        (-9, 4, AirflowException, True),  # the last try
        (EXIT_DIVERGED, 1, AirflowFailException, True),
        (EXIT_CONFIG, 1, AirflowFailException, True),
    ],
)
def test_exit_codes_decide_about_retries_and_the_run(
    store: ObjectStore,
    operator: ProcessOperator,
    exit_code: int,
    try_number: int,
    error: type[Exception],
    stops_run: bool,
) -> None:
    with pytest.raises(AirflowException, match="because") as raised:
        operator.resume(context(operator, try_number=try_number), ended(exit_code))
    assert type(raised.value) is error
    stop = control.read_stop(store)
    assert (stop is not None) == stops_run
    assert stop is None or (stop.failed and stop.source == "learner")


def test_a_lost_process_is_worth_another_try(operator: ProcessOperator) -> None:
    with pytest.raises(AirflowException) as raised:
        operator.resume(context(operator), ended(None, "lost"))
    assert type(raised.value) is AirflowException


def test_nothing_is_retried_in_a_run_that_is_ending(store: ObjectStore, operator: ProcessOperator) -> None:
    control.request_stop(store, reason="learner diverged", source="learner", failed=True)
    with pytest.raises(AirflowFailException, match="learner diverged"):
        operator.resume(context(operator), ended(75))


@pytest.mark.parametrize(
    ("states", "stops_run"),
    [
        ({"actors_0": "running", "actors_1": "deferred"}, False),
        ({"actors_0": "running", "actors_1": "up_for_retry"}, False),
        ({"actors_0": "running", "actors_1": "failed"}, True),
    ],
)
def test_a_group_of_actors_ends_the_run_only_below_min_actors(
    store: ObjectStore, states: dict[str, str], stops_run: bool
) -> None:
    operator = ProcessOperator(
        task_id="actors", run_uri=store.uri, process="actor-0", module="tasks.run_actor", pooled=True, needs="pool"
    )
    ti = {"task_id": "actors", "map_index": 0, "max_tries": 0, "states": states}
    with pytest.raises(AirflowException):
        operator.resume(context(operator, **ti), ended(1))
    assert (control.read_stop(store) is not None) == stops_run


def test_an_abandoned_process_ends_the_run_and_is_waited_for(store: ObjectStore, operator: ProcessOperator) -> None:
    event = {"state": "abandoned", "exit_code": None, "reason": "task sync_weights is failed", "failed": True}
    with pytest.raises(TaskDeferred) as again:
        operator.resume(context(operator), event, attempt=3)
    assert again.value.trigger.attempt == 3
    stop = control.read_stop(store)
    assert stop is not None
    assert stop.failed


def test_a_time_out_stops_the_process(
    store: ObjectStore, operator: ProcessOperator, script: Callable[..., None]
) -> None:
    script(learner={"waits": True})
    with pytest.raises(TaskDeferred):
        operator.execute(context(operator))
    with pytest.raises(AirflowException, match="longer than") as raised:
        operator.resume_execution("__fail__", {"error": "Trigger timeout"}, context(operator))
    assert not isinstance(raised.value, TaskDeferralTimeout)
    observer = process_table.ProcessObserver(store, "learner")
    assert process_table.wait_until(lambda: observer.status().state == "failed", 120)


def test_the_launched_process_follows_the_runs_configuration(store: ObjectStore, operator: ProcessOperator) -> None:
    assert operator._spec(context(operator)).cpus == ()
    pool = ProcessOperator(
        task_id="actors",
        run_uri=store.uri,
        process="actor-0",
        module="tasks.run_actor",
        pooled=True,
        needs="pool",
        place="actor",
    )
    spec = pool._spec(context(pool))
    assert spec.heartbeat_names == ["actor-0-0"]
    assert spec.restarts == 5


def test_a_run_that_does_not_exist_is_retried_not_launched(root: str) -> None:
    operator = ProcessOperator(task_id="x", run_uri=f"{root}/none", process="x", module="tasks.x", needs="nothing")
    with pytest.raises(AirflowException, match="was not started"):
        operator.execute(context(operator))


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("learner", ((3,), False)),
        ("actor", ((1, 2), True)),
        ("other", ((1,), False)),
        ("alone", ((), False)),
    ],
)
def test_each_place_has_its_cpus_and_priority(root: str, place: Any, expected: tuple[tuple[int, ...], bool]) -> None:
    launcher = {"learner_cpus": [3], "actor_cpus": [1, 2], "other_cpus": [1], "idle_actors": True}
    config = load_recipe("lookup", {f"launcher.{name}": value for name, value in launcher.items()})
    placed = open_store(f"{root}/placed")
    create_run(placed, config, run_id="manual__2", extra={"dag_id": "post_training"})
    operator = ProcessOperator(task_id="any", run_uri=placed.uri, process="any", module="tasks.any", place=place)
    spec = operator._spec(context(operator))
    assert (spec.cpus, spec.idle) == expected

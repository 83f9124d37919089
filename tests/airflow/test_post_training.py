"""The DAG `post_training` in a real Airflow, with scripted components."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.airflow_service import DAG, ScriptedAirflow
from tunix_core.processes import wait_until
from tunix_core.storage import control
from tunix_core.storage.store import read_json


@pytest.mark.airflow
@pytest.mark.timeout(600)
def test_a_run_survives_killed_components(scripted_service: ScriptedAirflow) -> None:
    """kill -9 of the learner, of an actor and of a supervisor; the run succeeds and tells the assets."""
    airflow = scripted_service
    run_id = airflow.trigger(1, learner={"seconds": 8})
    learner = airflow.wait_for_life(run_id, "learner")
    os.kill(airflow.wait_for_life(run_id, "actor-0-0"), signal.SIGKILL)
    airflow.wait_for_life(run_id, "sync_weights")
    store = airflow.store(run_id)
    assert wait_until(lambda: control.read_process(store, "sync_weights")[0].state == "running", 120)
    os.kill(control.read_process(store, "sync_weights")[0].pid, signal.SIGKILL)
    os.kill(learner, signal.SIGKILL)

    airflow.wait_for_life(run_id, "learner", 2)
    airflow.wait_for_life(run_id, "actor-0-0", 2)
    airflow.wait_for_life(run_id, "sync_weights", 2)
    assert airflow.client.wait_for_run(DAG, run_id, 240) == "success", airflow.explain(run_id)

    tries = {(t["task_id"], t["map_index"]): t["try_number"] for t in airflow.client.task_instances(DAG, run_id)}
    assert tries["learner", -1] == 2
    assert tries["sync_weights", -1] == 2
    assert tries["actors", 0] == 1  # the supervisor restarted it in place
    assert read_json(store, "scripted/learner.json")["steps"] == 80  # the second life resumed
    first, second = (airflow.client.logs(DAG, run_id, "learner", try_number=n) for n in (1, 2))
    assert any("killed by SIGKILL" in line for line in first)
    assert any(line.startswith("step ") and "/80 reward 0.5" in line for line in first + second)
    released = [e for e in airflow.client.asset_events() if e["source_run_id"] == run_id]
    assert {(e["source_task_id"], e["extra"]["version"]) for e in released} == {("sync_weights", 1), ("finalize", 1)}

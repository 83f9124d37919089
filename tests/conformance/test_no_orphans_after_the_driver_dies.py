"""Engines lived on after the driver was killed (AReaL #622, verl #7990)."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.airflow_service import DAG, ScriptedAirflow, processes_of
from tunix_core.errors import EXIT_DIVERGED
from tunix_core.processes import wait_until
from tunix_core.storage import control


@pytest.mark.airflow
def test_no_orphans_after_the_driver_dies(scripted_service: ScriptedAirflow) -> None:
    """No process of a run is left 30 s after its end, however it ended.

    Three ends at once: a person marks the run as failed while stubborn components work; a
    component fails for good; the supervisor of every component is killed, and then the run
    cancelled.
    """
    airflow = scripted_service
    stubborn = {"ignores": ["SIGTERM"], "ignores_stop": True, "waits": True}
    cancelled = airflow.trigger(11, learner={"waits": True}, checkpoint=stubborn, **{"actor-0-0": stubborn})
    diverged = airflow.trigger(12, learner={"crash_at": {"1": [20, EXIT_DIVERGED]}})
    beheaded = airflow.trigger(13, learner={"waits": True}, **{"actor-1-0": stubborn})
    runs = [cancelled, diverged, beheaded]
    for run_id in runs:
        for process in ("learner", "actor-0-0", "actor-1-0", "checkpoint", "sync_weights"):
            airflow.wait_for_life(run_id, process)
    for record in control.read_processes(airflow.store(beheaded)).values():
        if record.state == "running":
            os.kill(record.pid, signal.SIGKILL)
    for run_id in (cancelled, beheaded):
        assert processes_of(airflow.store(cancelled).uri)
        airflow.client.mark(DAG, run_id, "failed")

    for run_id in runs:
        assert airflow.client.wait_for_run(DAG, run_id, 120) == "failed", airflow.explain(run_id)
        uri = airflow.store(run_id).uri
        assert wait_until(lambda: not processes_of(uri), 30), airflow.explain(run_id)  # noqa: B023
    stop = control.read_stop(airflow.store(diverged))
    assert stop is not None
    assert stop.failed
    assert stop.source == "learner"
    states = airflow.client.task_states(DAG, diverged)
    assert states["learner", -1] == "failed"
    assert states["finalize", -1] == "success"  # what there was has been evaluated and reported

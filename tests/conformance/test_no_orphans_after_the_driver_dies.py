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
@pytest.mark.timeout(600)
def test_no_orphans_after_the_driver_dies(scripted_service: ScriptedAirflow) -> None:
    """No process of a run is left 30 s after its end, however it ended.

    Two ends at once: a component fails for good; and supervisors are killed and the run is cancelled by
    a person while stubborn components work.
    """
    airflow = scripted_service
    stubborn = {"ignores": ["SIGTERM"], "ignores_stop": True, "waits": True}
    diverged = airflow.trigger(11, learner={"crash_at": {"1": [20, EXIT_DIVERGED]}})
    cancelled = airflow.trigger(12, learner={"waits": True}, checkpoint=stubborn, **{"actor-1-0": stubborn})
    for run_id in (diverged, cancelled):
        for process in ("learner", "actor-0-0", "actor-1-0", "checkpoint", "sync_weights"):
            airflow.wait_for_life(run_id, process)
    records = control.read_processes(airflow.store(cancelled))
    for process in ("learner", "actor-1"):
        os.kill(records[process].pid, signal.SIGKILL)
    assert len(processes_of(airflow.store(cancelled).uri)) >= 4
    airflow.client.mark(DAG, cancelled, "failed")

    for run_id in (diverged, cancelled):
        assert airflow.client.wait_for_run(DAG, run_id, 240) == "failed", airflow.explain(run_id)
        uri = airflow.store(run_id).uri
        assert wait_until(lambda: not processes_of(uri), 30), airflow.explain(run_id)  # noqa: B023
    stop = control.read_stop(airflow.store(diverged))
    assert stop is not None
    assert stop.failed
    assert stop.source == "learner"
    states = airflow.client.task_states(DAG, diverged)
    assert states["learner", -1] == "failed"
    assert states["finalize", -1] == "success"  # what there was has been evaluated and reported

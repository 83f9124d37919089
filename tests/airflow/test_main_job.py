"""The main job as `make demo` runs it, under kills and with Airflow down: minutes, so `make chaos` runs it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.airflow_service import DAG, processes_of
from tunix_core import paths
from tunix_core.console.demo import launcher_overrides, split_cpus
from tunix_core.console.emulator import start_fake_gcs
from tunix_core.console.service import AirflowService, default_options
from tunix_core.evaluation.audit import audit_run, ledger_faults
from tunix_core.processes import wait_until
from tunix_core.storage import control, process_table
from tunix_core.storage.store import ObjectStore, open_store

NUM_STEPS = 100
OUTAGE_SECONDS = 60.0


@dataclasses.dataclass
class MainJob:
    """An Airflow of the test's own and one run of `post_training` in it."""

    service: AirflowService
    run_id: str
    store: ObjectStore

    def clock(self) -> int:
        signal_ = control.read_learner_signal(self.store)
        return -1 if signal_ is None else signal_.clock

    def wait_for_clock(self, clock: int) -> None:
        assert wait_until(lambda: self.clock() >= clock, 400, 0.5), f"step {self.clock()}, waiting for {clock}"

    def pid(self, module: str, *arguments: str) -> int:
        """The process itself, not its supervisor."""
        found = []
        for pid in processes_of(self.store.uri):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if module in words and "tasks.supervise" not in words and all(word in words for word in arguments):
                found.append(pid)
        assert len(found) == 1, (module, found)
        return found[0]

    def kill(self, module: str, *arguments: str) -> None:
        """`kill -9`, and wait for its successor."""
        old = self.pid(module, *arguments)
        os.kill(old, signal.SIGKILL)

        def replaced() -> bool:
            try:
                return self.pid(module, *arguments) != old
            except (AssertionError, OSError):
                return False

        assert wait_until(replaced, 90, 0.5), f"{module} did not come back"


@pytest.fixture(params=["local", "gs"])
def job(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MainJob]:
    emulator = start_fake_gcs() if request.param == "gs" else None
    root = f"file://{tmp_path}/runs" if emulator is None else f"{emulator.uri}/runs"
    environment = {} if emulator is None else emulator.env
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    service = AirflowService(tmp_path / "home")
    options = default_options([root], cpus=split_cpus()[1])
    store: ObjectStore | None = None
    try:
        service.start(dataclasses.replace(options, environment=tuple(environment.items())))
        client = service.client()
        client.wait_for_dag(DAG, 120)
        client.unpause(DAG)
        run_id = client.trigger(DAG, {"num_steps": NUM_STEPS, "overrides": launcher_overrides()})
        store = open_store(f"{root}/{paths.run_name(DAG, run_id)}")
        yield MainJob(service=service, run_id=run_id, store=store)
    finally:
        service.stop()
        if store is not None:
            process_table.stop_run(store, reason="test is over", source="test")
        if emulator is not None:
            emulator.stop()


@pytest.mark.slow
@pytest.mark.airflow
@pytest.mark.timeout(1800)
def test_the_main_job_survives_kills_and_an_outage_of_airflow(job: MainJob) -> None:
    """Learner, actor and sync are killed, scheduler and api-server go away: nothing is lost or repeated."""
    job.wait_for_clock(12)
    job.kill("tasks.run_learner")
    job.wait_for_clock(20)
    job.kill("tasks.run_actor", "actor-1-0")
    job.kill("tasks.sync_weights")
    job.wait_for_clock(30)

    before = job.clock()
    started = time.monotonic()
    for component in ("scheduler", "api-server"):
        job.service.stop_component(component)
    down = {name: process is None for name, process in job.service.components().items()}
    assert (down["scheduler"], down["api-server"]) == (True, True)
    clocks = []
    while time.monotonic() - started < OUTAGE_SECONDS:
        time.sleep(OUTAGE_SECONDS / 4)
        clocks.append(job.clock())
    for component in ("api-server", "scheduler"):
        job.service.start_component(component)
    job.service.wait_healthy(180)
    # In every quarter of the outage, not only while something was still buffered.
    assert [before, *clocks] == sorted({before, *clocks}), f"steps over the outage: {before}, {clocks}"

    state = job.service.client().wait_for_run(DAG, job.run_id, 900)
    assert state == "success", job.service.client().task_states(DAG, job.run_id)
    assert wait_until(lambda: not processes_of(job.store.uri), 30), "processes of the run are left"

    summary = json.loads(job.store.get(paths.REPORTS + "summary.json"))
    audit = audit_run(job.store, max_staleness=summary["max_staleness"])
    print(json.dumps(summary))
    print(f"steps at the start of the outage and after each quarter of it: {before}, {clocks}")
    assert summary["num_steps"] == NUM_STEPS
    assert summary["ledger_faults"] == []
    assert ledger_faults(summary["ledger"], audit) == []
    assert (summary["staleness_violations"], summary["consumed_twice"]) == (0, 0)
    assert summary["num_policy_versions"] >= 10
    tries = {t["task_id"]: t["try_number"] for t in job.service.client().task_instances(DAG, job.run_id)}
    assert tries["learner"] >= 2
    assert tries["sync_weights"] >= 2

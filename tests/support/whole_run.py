"""All processes of a run, real ones, without Airflow: started, paused, killed, started again, and audited in the end.

The policy is tiny and untrained, the environment `slow_environment`: the run is about the processes and the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.actor.support import ACTOR, MODEL, weights
from tests.support import slow_environment
from tests.support.quick_compiler import QUICK_FLAGS
from tunix_core.config import (
    AlgorithmConfig,
    CheckpointConfig,
    LearnerConfig,
    RunConfig,
    StalenessConfig,
    SyncConfig,
)
from tunix_core.config_loading import config_to_dict
from tunix_core.environment_config import EnvironmentConfig
from tunix_core.evaluation.audit import RunAudit, audit_run, ledger_faults
from tunix_core.models.decoder import flatten_parameters
from tunix_core.storage import control
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.run_directory import create_run
from tunix_core.storage.snapshots import SnapshotStore
from tunix_core.storage.step_records import read_steps
from tunix_core.storage.store import ObjectStore, open_store

ROOT = Path(__file__).parents[2]
ACTORS = ("actor-0-0", "actor-0-1")
MODULES = {
    **dict.fromkeys(ACTORS, "run_actor"),
    "learner": "run_learner",
    "sync_weights": "sync_weights",
    "checkpoint": "checkpoint",
}
PATIENCE_SECONDS = 240.0
"""For anything that must happen; a busy machine takes ten times what an idle one does."""


def configuration(num_steps: int, **staleness: Any) -> RunConfig:
    return RunConfig(
        recipe="whole-run",
        model=MODEL,
        environment=EnvironmentConfig(
            name=slow_environment.NAME, num_tasks=64, latency_mean_seconds=0.15, latency_sigma=0.8
        ),
        algorithm=AlgorithmConfig(group_size=4, temperature=0.8),
        learner=LearnerConfig(
            num_steps=num_steps, groups_per_batch=4, window_tokens=64, max_windows=16, windows_per_microbatch=4
        ),
        staleness=StalenessConfig(control_interval_seconds=0.1, **staleness),
        sync=SyncConfig(interval_seconds=0.1),
        checkpoint=CheckpointConfig(interval_steps=5, verify_interval_seconds=1.0, keep=2, grace_seconds=1.0),
        actor=dataclasses.replace(
            ACTOR, task_block_size=4, flush_seconds=0.1, min_swap_seconds=0.05, poll_seconds=0.1, drain_seconds=0.0
        ),
    )


class WholeRun:
    """Processes by name, as `MODULES` has them."""

    def __init__(self, uri: str, config: RunConfig, folder: Path, cache: Path, environment: Mapping[str, str]) -> None:
        self.uri = uri
        self.config = config
        self.store: ObjectStore = open_store(uri)
        self._folder = folder
        packages = os.pathsep.join([str(slow_environment.install(folder / "packages")), str(ROOT)])
        self._environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": QUICK_FLAGS,
            "TUNIX_COMPILATION_CACHE": str(cache),
            "PYTHONPATH": packages,
            **environment,
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._attempts = dict.fromkeys(MODULES, 0)
        self.revives = False
        """Whether the test starts again what has failed."""
        create_run(self.store, config, run_id="whole-run")
        tensors = flatten_parameters(weights(0))
        SnapshotStore(self.store).write(0, tensors, incarnation="w0")
        PolicyStore(self.store).publish(
            0, tensors, config=config_to_dict(config), parent=None, publisher="warm_start", gate={}
        )

    # ---- processes ----------------------------------------------------------------------------

    def start(self, *names: str) -> None:
        for name in names or MODULES:
            self._attempts[name] += 1
            with (self._folder / f"{name}.log").open("ab") as log:
                self._processes[name] = subprocess.Popen(
                    [sys.executable, "-m", f"tasks.{MODULES[name]}", "--run", self.uri, "--process", name,
                     "--attempt", str(self._attempts[name])],
                    cwd=ROOT, env=self._environment, stdout=log, stderr=log,
                )  # fmt: skip

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()

    @contextlib.contextmanager
    def paused(self, *names: str) -> Iterator[None]:
        for name in names:
            self._processes[name].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for name in names:
                self._processes[name].send_signal(signal.SIGCONT)

    def check(self) -> None:
        """All are alive, or have ended as they should."""
        for name, process in self._processes.items():
            assert process.poll() in (None, 0), f"{name} ended with {process.returncode}:\n{self.log(name)}"

    def revive(self) -> None:
        """Start again what ended to be started again, as a supervisor does."""
        for name, process in list(self._processes.items()):
            if process.poll() not in (None, 0):
                self.start(name)

    def is_alive(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()[-4000:]

    def stop(self) -> None:
        """End it in order: a stop request, and every process ends by itself."""
        control.request_stop(self.store, reason="test is over", source="test", failed=False)
        self.wait_for_end()

    def wait_for_end(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        for name, process in self._processes.items():
            process.wait(max(1.0, deadline - time.monotonic()))
            assert process.returncode == 0, f"{name} ended with {process.returncode}:\n{self.log(name)}"

    def stop_reviving(self) -> None:
        """End it in order although processes may have to be started again on the way."""
        control.request_stop(self.store, reason="test is over", source="test", failed=False)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(process.poll() != 0 for process in self._processes.values()):
            assert time.monotonic() < deadline, {n: (p.poll(), self.log(n)) for n, p in self._processes.items()}
            self.revive()
            time.sleep(0.2)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    # ---- what it is at ------------------------------------------------------------------------

    def clock(self) -> int:
        signal_ = control.read_learner_signal(self.store)
        return -1 if signal_ is None else signal_.clock

    def progress(self) -> dict[str, Any]:
        """Of the learner."""
        beat = control.read_heartbeat(self.store, "learner")
        return dict(beat.progress) if beat else {}

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if not self.revives:
                self.check()
            assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_SECONDS} s, at step {self.clock()}"
            time.sleep(0.05)

    def wait_for_steps(self, num: int, what: str) -> None:
        """So many more than now."""
        target = self.clock() + num
        self.wait_for(lambda: self.clock() >= target, f"{what}: step {target}")

    def audit(self) -> RunAudit:
        """What must hold of any run that has ended; `audit_run`'s findings."""
        audit = audit_run(self.store, max_staleness=self.config.staleness.max_staleness)
        ledger = self.progress()["ledger"]
        assert ledger_faults(ledger, audit) == []
        assert audit.staleness_violations == 0
        assert audit.consumed_twice == []
        clocks = [record["clock"] for record in read_steps(self.store, 0)]
        assert clocks == list(range(1, len(clocks) + 1))
        versions = PolicyStore(self.store).versions()
        assert versions == sorted(set(versions))
        return audit


@contextlib.contextmanager
def whole_run(
    uri: str, config: RunConfig, folder: Path, cache: Path, environment: Mapping[str, str] | None = None
) -> Iterator[WholeRun]:
    """A run whose processes are gone after the block; start them in it."""
    run = WholeRun(uri, config, folder, cache, environment or {})
    try:
        yield run
    finally:
        run.close()

"""Launchers start a supervised process somewhere and never wait for it.

What they share is the record in the run directory: a launcher claims the next attempt there, and
whoever wants to know reads it there. A launcher for another place (a cluster's jobs) has the same
one method and starts the same `python -m tasks.supervise`.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from typing import Protocol

from plugins.runs import store_roots
from tunix_core import paths
from tunix_core.errors import StoreError
from tunix_core.processes import has_exited, spawn_detached, wait_until
from tunix_core.storage import control, process_table
from tunix_core.storage.control import ProcessRecord
from tunix_core.storage.store import ObjectStore, open_store

_START_SECONDS = 60.0
_REPLACE_GRACE_SECONDS = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """One process to run."""

    run_uri: str
    process: str
    submission_key: str
    """Names the work: submitting it again re-attaches, or finds it done."""
    module: str
    arguments: tuple[str, ...] = ()
    replicas: int = 0
    """0: one process; otherwise a pool of so many."""
    restarts: int = 0
    cpus: tuple[int, ...] = ()
    idle: bool = False
    ignore_stop: bool = False

    def __post_init__(self) -> None:
        paths.name("process", self.process)

    @property
    def heartbeat_names(self) -> list[str]:
        return [f"{self.process}-{i}" for i in range(self.replicas)] if self.replicas else [self.process]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submission:
    """`started`: a new attempt; otherwise the same work was found under way or done."""

    record: ProcessRecord
    started: bool


class Launcher(Protocol):
    def submit(self, spec: LaunchSpec) -> Submission:
        """Start the process, unless this submission of it already runs or has succeeded.

        Another submission of the process that still runs is stopped first.

        Raises:
            ConfigError: a run outside the configured roots.
            StoreError: it did not start.
        """


class LocalLauncher:
    """Detached processes of this host, in sessions of their own: no end of Airflow's touches them."""

    def submit(self, spec: LaunchSpec) -> Submission:
        store = open_store(spec.run_uri, roots=store_roots())
        try:
            claim = process_table.claim(store, spec.process, spec.submission_key)
        except process_table.StillRunning:
            process_table.stop_and_wait(
                store,
                spec.process,
                reason=f"replaced by submission {spec.submission_key}",
                grace_seconds=_REPLACE_GRACE_SECONDS,
            )
            claim = process_table.claim(store, spec.process, spec.submission_key)
        if claim.new:
            self._spawn(store, spec, claim.record)
        return Submission(record=claim.record, started=claim.new)

    def _spawn(self, store: ObjectStore, spec: LaunchSpec, record: ProcessRecord) -> None:
        """Start the supervisor and return once its record says so."""
        arguments = [sys.executable, "-m", "tasks.supervise", "--run", spec.run_uri, "--process", spec.process]
        arguments += ["--submission-key", spec.submission_key, "--attempt", str(record.attempt)]
        arguments += ["--cpus", ",".join(map(str, spec.cpus)) or "all", "--restarts", str(spec.restarts)]
        arguments += ["--idle"] if spec.idle else []
        arguments += ["--replicas", str(spec.replicas)] if spec.replicas else []
        arguments += ["--ignore-stop"] if spec.ignore_stop else []
        arguments += ["--", sys.executable, "-m", spec.module, "--run", spec.run_uri]
        arguments += ["--process", "{process}", "--attempt", "{attempt}", *spec.arguments]
        # No log of its own: its children's logs are bounded, and if it cannot start, the record says so.
        pid = spawn_detached(arguments, child_environment())
        ended = False

        def decided() -> bool:
            nonlocal ended
            ended = has_exited(pid)
            found = control.read_process(store, spec.process)
            return ended or found is None or found[0].state != "starting"

        wait_until(decided, _START_SECONDS, 0.1)
        found = control.read_process(store, spec.process)
        if found is not None and found[0].state == "starting" and found[0].attempt == record.attempt:
            process_table.end(store, found[0], "the supervisor did not start")  # and if it does yet, it is fenced
            raise StoreError(
                f"{spec.process}: the supervisor {'ended' if ended else 'hangs'} before it took over; "
                f"run it by hand to see why: {shlex.join(arguments)}"
            )


def child_environment() -> dict[str, str]:
    """This process's environment without Airflow's: its secrets are none of a component's business."""
    return {key: value for key, value in os.environ.items() if "AIRFLOW" not in key}

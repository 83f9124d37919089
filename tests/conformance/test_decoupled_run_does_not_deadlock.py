"""Async mode with tools of 0.1 to 0.3 s deadlocked (google-tunix, measured).

Real processes, tools of random latency. One after another: the learner waits because actors stand still, publication lags because its
process does, the gate refuses, and the learner throttles itself. After each the run goes on by itself. `make soak` goes through
them again and again; the simulator proves it over the whole space of settings (`tests/simulation`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.whole_run import ACTORS, WholeRun, configuration, whole_run
from tunix_core import paths
from tunix_core.errors import ObjectExists
from tunix_core.storage.snapshots import SnapshotStore
from tunix_core.storage.store import write_json_if_absent

SOAK_SECONDS = float(os.environ.get("TUNIX_SOAK_SECONDS", "60"))


@contextlib.contextmanager
def refusing_gate(run: WholeRun) -> Iterator[list[int]]:
    """Two of three snapshots are refused, in the gate's own way, before it can look at them."""
    refused: list[int] = []
    over = threading.Event()

    def refuse() -> None:
        snapshots = SnapshotStore(run.store)
        while not over.wait(0.02):
            newest = snapshots.latest_version()
            for version in range(newest + 1, newest + 4) if newest is not None else ():
                if version % 3 and version not in refused:
                    body = {"version": version, "reason": "scripted", "refused_at": time.time()}
                    with contextlib.suppress(ObjectExists):
                        write_json_if_absent(run.store, paths.snapshot_refusal(version), body)
                        refused.append(version)

    thread = threading.Thread(target=refuse)
    thread.start()
    try:
        yield refused
    finally:
        over.set()
        thread.join()


def go_through_all(run: WholeRun, num_steps: int, pause_seconds: float) -> None:
    run.wait_for_steps(num_steps, "undisturbed")
    with run.paused(*ACTORS):
        time.sleep(pause_seconds)
    run.wait_for_steps(num_steps, "after actors stood still")
    with run.paused("sync_weights"):
        time.sleep(pause_seconds)
    run.wait_for_steps(num_steps, "after publication lagged")
    with refusing_gate(run) as refused:
        run.wait_for(lambda: len(refused) >= num_steps, "refusals")
    run.wait_for_steps(num_steps, "after the gate refused")
    with run.paused("learner"):
        time.sleep(pause_seconds)
    run.wait_for_steps(num_steps, "after the learner stood still")


def test_decoupled_run_does_not_deadlock(tmp_path: Path, cache: Path) -> None:
    # A mean so low that the learner often has to wait for fresher data.
    config = configuration(10_000, max_mean_staleness=0.5, max_throttle_seconds=0.5)
    with whole_run(str(tmp_path / "run"), config, tmp_path, cache) as run:
        run.start()
        run.wait_for_steps(1, "the first step")
        go_through_all(run, 3, 2.0)
        run.stop()
        audit = run.audit()
        assert len(audit.policy_versions) >= 3


@pytest.mark.slow
@pytest.mark.timeout(SOAK_SECONDS + 900)
@pytest.mark.parametrize("bound", [1, 4])
def test_a_long_run_does_not_deadlock(tmp_path: Path, cache: Path, bound: int) -> None:
    config = configuration(10**6, max_staleness=bound, max_mean_staleness=bound / 2, max_throttle_seconds=2.0)
    with whole_run(str(tmp_path / "run"), config, tmp_path, cache) as run:
        run.start()
        run.wait_for_steps(1, "the first step")
        ended = time.monotonic() + SOAK_SECONDS
        rounds = 0
        while time.monotonic() < ended:
            go_through_all(run, 10, 5.0)
            rounds += 1
        run.stop()
        audit = run.audit()
        print(f"bound {bound}: {rounds} rounds, {len(audit.steps)} steps, {len(audit.policy_versions)} versions, "
              f"staleness {audit.staleness}")  # fmt: skip

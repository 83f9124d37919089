"""The DAG `evaluate_trajectories` in a real Airflow, filled in for past hours by Airflow's own command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.airflow_service import ScriptedAirflow
from tests.support.run_factory import tiny_config, write_group
from tunix_core.evaluation.trajectories import HourEvaluation, read_evaluations
from tunix_core.processes import wait_until
from tunix_core.storage.run_directory import create_run
from tunix_core.storage.store import ObjectStore, open_store
from tunix_core.storage.trajectory_writer import TrajectoryWriter

DAG = "evaluate_trajectories"
DAY = 1_768_435_200.0
"""2026-01-15T00:00:00Z: a day whose hours are closed, after the DAG's start date."""
HOURS = {8: (0, 1), 9: (1, 2, 3)}
"""Hour -> policy versions that wrote in it."""


def partition(hour: int) -> str:
    return f"date=2026-01-15/hour={hour:02d}"


def write_groups(store: ObjectStore, hour: int, versions: tuple[int, ...], *, incarnation: str = "inc0") -> None:
    """One shard per version with a group of four, of which `version` members are solved."""
    now = DAY + 3600 * hour + 60
    writer = TrajectoryWriter(store, actor_id="actor_0_0", incarnation=f"{incarnation}{hour}", clock=lambda: now)
    for version in versions:
        group_id = f"{incarnation}-{hour:02d}-{version:04d}"
        write_group(writer, group_id, version=version, num_solved=version, created_at=now)
    writer.close()


def backfill(airflow: ScriptedAirflow, name: str, *options: str) -> None:
    """`airflow backfill create` over all of HOURS, and wait until it is complete."""
    first, last = min(HOURS), max(HOURS)
    known = len(airflow.client.backfills(DAG))
    command = [sys.executable, "-m", "airflow", "backfill", "create", "--dag-id", DAG]
    command += ["--from-date", f"2026-01-15T{first:02d}:00:00", "--to-date", f"2026-01-15T{last:02d}:00:00"]
    command += ["--dag-run-conf", json.dumps({"run": name}), *options]

    for _ in range(3):
        done = subprocess.run(
            command, env=airflow.service.environment(), cwd=airflow.folder, capture_output=True, text=True, timeout=120
        )
        # SQLite turns a transaction away that read before the scheduler wrote, and the command does not try
        # again. What it had created by then counts as a backfill, and Airflow takes one at a time.
        locked = "database is locked" in done.stderr
        assert done.returncode == 0 or locked, done.stdout + done.stderr
        assert wait_until(lambda: all(b["completed_at"] for b in airflow.client.backfills(DAG)), 240, 1.0)
        if not locked:
            assert len(airflow.client.backfills(DAG)) > known
            return
    raise AssertionError(done.stdout + done.stderr)


def by_version(evaluation: HourEvaluation) -> dict[int, tuple[int, float]]:
    """Policy version -> episodes and their share of solved tasks."""
    rows = evaluation.table.to_pylist()
    return {row["policy_version"]: (row["num_episodes"], row["success_share"]) for row in rows}


@pytest.mark.airflow
@pytest.mark.timeout(1200)
def test_a_backfill_evaluates_past_hours_once(scripted_service: ScriptedAirflow) -> None:
    """Rows per policy version for closed hours; done again the same rows, once; a grown hour afresh."""
    airflow = scripted_service
    store = open_store(f"{airflow.root}/seeded")
    create_run(store, tiny_config(), run_id="seeded", extra={"dag_id": "post_training"})
    for hour, versions in HOURS.items():
        write_groups(store, hour, versions)
    airflow.client.wait_for_dag(DAG, 120)
    airflow.client.unpause(DAG)

    backfill(airflow, "seeded")
    found = read_evaluations(store)
    expected = {
        partition(hour): {version: (4, version / 4) for version in versions} for hour, versions in HOURS.items()
    }
    assert {name: by_version(evaluation) for name, evaluation in found.items()} == expected
    objects = store.list_after("evaluations/")

    backfill(airflow, "seeded", "--reprocess-behavior", "completed")
    assert store.list_after("evaluations/") == objects
    assert {name: by_version(evaluation) for name, evaluation in read_evaluations(store).items()} == expected

    write_groups(store, 9, (4,), incarnation="late")
    backfill(airflow, "seeded", "--reprocess-behavior", "completed")
    expected[partition(9)][4] = (4, 1.0)
    assert {name: by_version(evaluation) for name, evaluation in read_evaluations(store).items()} == expected

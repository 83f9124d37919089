"""A real Airflow for tests: the project's own service, with scripted components under the real DAGs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunix_core import paths
from tunix_core.console.airflow_client import AirflowClient
from tunix_core.console.service import AirflowService, default_options
from tunix_core.errors import ObjectMissing
from tunix_core.processes import wait_until
from tunix_core.storage import process_table
from tunix_core.storage.store import ObjectStore, open_store, read_json

DAG = "post_training"

COMPONENTS: dict[str, dict[str, Any]] = {
    "warm_start": {"seconds": 0.3, "publishes": 0},
    "learner": {"seconds": 6, "completes_run": True},
    "actor-0-0": {"waits": True},
    "actor-1-0": {"waits": True},
    "sync_weights": {"waits": True, "publishes": 1},
    "checkpoint": {"waits": True},
    "finalize": {"seconds": 0.3, "ignores_stop": True},
}
"""A run in which everything goes well."""


class ScriptedAirflow:
    """The service, and the scripts its runs play: a run's `seed` param picks its scripts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = f"file://{folder}/runs"
        self.scripts = folder / "scripts.json"
        self.scripts.write_text("{}")
        self.service = AirflowService(folder / "home")
        options = default_options([self.root])
        self.options = dataclasses.replace(
            options,
            import_paths=(str(Path(__file__).parent / "scripted"), *options.import_paths),
            environment=(("TUNIX_TEST_SCRIPTS", str(self.scripts)), ("TMPDIR", str(folder))),
        )
        self.client: AirflowClient

    def start(self) -> None:
        self.service.start(self.options)
        self.client = self.service.client()
        self.client.wait_for_dag(DAG, 120)
        self.client.unpause(DAG)

    def trigger(self, seed: int, **changes: dict[str, Any]) -> str:
        """Start a run whose components play COMPONENTS with these changes; returns its run id."""
        scripts = json.loads(self.scripts.read_text())
        scripts[str(seed)] = {name: {**script, **changes.get(name, {})} for name, script in COMPONENTS.items()}
        self.scripts.write_text(json.dumps(scripts))
        return self.client.trigger(DAG, {"seed": seed})

    def store(self, run_id: str) -> ObjectStore:
        return open_store(f"{self.root}/{paths.run_name(DAG, run_id)}")

    def wait_for_life(self, run_id: str, process: str, number: int = 1, timeout_seconds: float = 180) -> int:
        """Wait until a component lives for that time; returns its pid."""
        key = f"scripted/{process}-lives.json"

        def lives() -> int:
            with contextlib.suppress(ObjectMissing):
                return int(read_json(self.store(run_id), key)["lives"])
            return 0

        assert wait_until(lambda: lives() >= number, timeout_seconds, 0.2), f"{process} did not reach life {number}"
        return int(read_json(self.store(run_id), key)["pid"])

    def explain(self, run_id: str) -> str:
        """What a failed assertion should show."""
        tasks = [
            (t["task_id"], t["map_index"], t["state"], t["try_number"]) for t in self.client.task_instances(DAG, run_id)
        ]
        records = process_table.control.read_processes(self.store(run_id))
        return "\n".join(map(str, [*tasks, *records.values()]))


def processes_of(run_uri: str) -> list[int]:
    """Every process of this machine with the run in its command line, whatever records say."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if run_uri.encode() in Path(f"/proc/{entry}/cmdline").read_bytes():
                    found.append(int(entry))
    return found


def scripted_airflow(folder: Path) -> Iterator[ScriptedAirflow]:
    airflow = ScriptedAirflow(folder)
    try:
        airflow.start()
        yield airflow
    finally:
        airflow.service.stop()
        for name in (folder / "runs").iterdir() if (folder / "runs").is_dir() else ():
            process_table.stop_run(open_store(str(name)), reason="test is over", source="test", voluntary_seconds=1)

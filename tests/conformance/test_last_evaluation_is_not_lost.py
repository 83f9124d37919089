"""prime-rl #2912: the final evaluation was dropped, or hung, at shutdown.

The last published version has its evaluation row when the run is closed; also when the process that
closes it is killed before, between or after its writes, because closing again finishes what is missing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.quick_compiler import QUICK_FLAGS
from tests.support.run_factory import make_run, tiny_config
from tunix_core import paths
from tunix_core.evaluation import held_out
from tunix_core.models.decoder import flatten_parameters, init_parameters
from tunix_core.storage.store import open_store

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 2


def start(folder: Path, cache: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": QUICK_FLAGS,
        "TUNIX_COMPILATION_CACHE": str(cache),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tasks.finalize", "--run", str(folder), "--full-buffer-seconds", "0.1"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def manifests(folder: Path) -> list[Path]:
    return sorted((folder / "evaluations" / held_out.NAME).rglob(paths.MANIFEST))


def test_last_evaluation_is_not_lost(tmp_path: Path, cache: Path) -> None:
    config = tiny_config(NUM_STEPS)
    store = open_store(str(tmp_path))
    make_run(store, num_steps=NUM_STEPS, config=config, tensors=flatten_parameters(init_parameters(config.model, 0)))

    process = start(tmp_path, cache)
    try:
        deadline = time.monotonic() + 200
        while not manifests(tmp_path) and process.poll() is None:
            assert time.monotonic() < deadline, "no evaluation in time"
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)  # the first version has its row, the last one none yet, most often
        process.communicate(timeout=120)

        closing = start(tmp_path, cache)
        output, _ = closing.communicate(timeout=200)
    finally:
        for started in (process, locals().get("closing")):
            if started is not None and started.poll() is None:
                started.kill()
                started.wait()
    assert closing.returncode == 0, output
    found = held_out.read_evaluations(store)
    assert sorted(found) == [0, NUM_STEPS], "first and last version"
    assert found[NUM_STEPS].success.n == config.evaluation.num_tasks
    assert held_out.read_outcomes(store, found[NUM_STEPS]).num_rows == config.evaluation.num_tasks
    assert json.loads(store.get(paths.REPORTS + "summary.json"))["policy_version_after"] == NUM_STEPS
    assert len(manifests(tmp_path)) == 2, "nothing was evaluated twice"

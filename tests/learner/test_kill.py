"""The real process, killed with SIGKILL in mid-run: the heart of the recovery promise."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.learner.support import VOCAB, consumed_ids, make_config, write_shards
from tunix_core import paths
from tunix_core.config import RunConfig, config_to_dict
from tunix_core.errors import EXIT_INTERRUPTED
from tunix_core.models.decoder import flatten_parameters, init_parameters
from tunix_core.storage.control import read_heartbeat, read_stop
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.run_directory import create_run
from tunix_core.storage.snapshots import SnapshotStore
from tunix_core.storage.step_records import read_steps
from tunix_core.storage.store import open_store

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 16


def tiny_config() -> RunConfig:
    return make_config(
        **{
            "model.vocab_size": VOCAB,
            "model.model_width": 16,
            "model.num_layers": 1,
            "model.num_heads": 2,
            "model.num_kv_heads": 1,
            "model.head_width": 8,
            "model.mlp_width": 32,
            "learner.num_steps": NUM_STEPS,
            "learner.max_windows": 2,
            "learner.windows_per_microbatch": 1,
            "staleness.max_staleness": 100,
            "checkpoint.interval_steps": 4,
        }
    )


def create(folder: Path) -> None:
    """A run with its policy 0 and more shards than its steps need."""
    store, config = open_store(str(folder)), tiny_config()
    create_run(store, config, run_id="tiny")
    tensors = flatten_parameters(init_parameters(config.model, 0))
    SnapshotStore(store).write(0, tensors, incarnation="w0")
    PolicyStore(store).publish(0, tensors, config=config_to_dict(config), parent=None, publisher="warm_start", gate={})
    write_shards(store, 2 * NUM_STEPS + 3)


def start(folder: Path, cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TUNIX_COMPILATION_CACHE": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-m", "tasks.run_learner", "--run", str(folder)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_to_end(folder: Path, cache: Path) -> str:
    process = start(folder, cache)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    return output


def end_at(folder: Path, cache: Path, clock: int, signum: int) -> int:
    """Send `signum` as soon as the record of step `clock` is there; returns the exit code."""
    process = start(folder, cache)
    deadline = time.monotonic() + 240
    while not (folder / paths.step(clock)).exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signum)
    process.communicate(timeout=240)
    return process.returncode


def final_state(folder: Path) -> dict[str, np.ndarray]:
    return SnapshotStore(open_store(str(folder))).load(NUM_STEPS)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("xla")


@pytest.mark.timeout(900)  # six processes that start JAX; seconds on an idle machine
def test_killed_twice_and_interrupted_once_equals_an_uninterrupted_run(tmp_path: Path, cache: Path) -> None:
    """Final parameters to the bit, every row once, the ledger to the token."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    create(killed)
    shutil.copytree(killed, whole)
    assert end_at(killed, cache, 3, signal.SIGKILL) == -signal.SIGKILL
    assert end_at(killed, cache, 10, signal.SIGKILL) == -signal.SIGKILL
    assert end_at(killed, cache, 13, signal.SIGTERM) in (EXIT_INTERRUPTED, 0)
    output = run_to_end(killed, cache)
    records = read_steps(open_store(str(killed)), 0)
    assert [r["clock"] for r in records] == list(range(1, NUM_STEPS + 1))
    assert len({r["incarnation"] for r in records}) >= 3
    refs = consumed_ids(records)
    assert len(refs) == len(set(refs)) == 4 * NUM_STEPS

    # The same step records in one life, from policy 0 on.
    shutil.copytree(killed / "steps", whole / "steps")
    run_to_end(whole, cache)
    expected, received = final_state(whole), final_state(killed)
    initial = SnapshotStore(open_store(str(whole))).load(0)
    for name in expected:
        np.testing.assert_array_equal(received[name], expected[name], err_msg=name)
    assert any(np.any(expected[name] != initial[name]) for name in expected)

    stop = read_stop(open_store(str(killed)))
    assert stop is not None, output
    assert (stop.reason, stop.failed) == ("completed", False)
    for folder in (killed, whole):
        progress = read_heartbeat(open_store(str(folder)), "learner").progress
        ledger = progress["ledger"]
        assert ledger["read"] == sum(n for name, n in ledger.items() if name != "read"), json.dumps(ledger)
        assert progress["ledger_trajectories"]["consumed"] == 4 * NUM_STEPS
        assert progress["ledger_trajectories"]["surplus"] == 6
        assert progress["compilations_after_warmup"] == 0
    assert "nothing to do" in run_to_end(killed, cache)


def test_a_run_without_policy_zero_says_so(tmp_path: Path, cache: Path) -> None:
    create_run(open_store(str(tmp_path)), tiny_config(), run_id="tiny")
    process = start(tmp_path, cache)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 74, output
    assert "policies/00000000" in output
    assert "Traceback" not in output

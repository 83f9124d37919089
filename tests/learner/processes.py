"""The learner as a real process on a tiny run, started, killed and run to its end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tests.learner.support import VOCAB, make_config, write_shards
from tests.support.quick_compiler import QUICK_FLAGS
from tunix_core import paths
from tunix_core.config import RunConfig
from tunix_core.config_loading import config_to_dict
from tunix_core.models.decoder import flatten_parameters, init_parameters
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.run_directory import create_run
from tunix_core.storage.snapshots import SnapshotStore
from tunix_core.storage.store import open_store

ROOT = Path(__file__).resolve().parents[2]


def tiny_config(num_steps: int) -> RunConfig:
    return make_config(
        **{
            "model.vocab_size": VOCAB,
            "model.model_width": 16,
            "model.num_layers": 1,
            "model.num_heads": 2,
            "model.num_kv_heads": 1,
            "model.head_width": 8,
            "model.mlp_width": 32,
            "learner.num_steps": num_steps,
            "learner.max_windows": 2,
            "learner.windows_per_microbatch": 1,
            "staleness.max_staleness": 1000,
            "staleness.max_mean_staleness": 1000.0,
            "checkpoint.interval_steps": 4,
        }
    )


def create(folder: Path, num_steps: int, num_groups: int | None = None) -> None:
    """A run with its policy 0 and more shards than its steps need, or so many groups."""
    store, config = open_store(str(folder)), tiny_config(num_steps)
    create_run(store, config, run_id="tiny")
    tensors = flatten_parameters(init_parameters(config.model, 0))
    SnapshotStore(store).write(0, tensors, incarnation="w0")
    PolicyStore(store).publish(0, tensors, config=config_to_dict(config), parent=None, publisher="warm_start", gate={})
    write_shards(store, 2 * num_steps + 3 if num_groups is None else num_groups)


def environment(cache: Path) -> dict[str, str]:
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": QUICK_FLAGS,
        "TUNIX_COMPILATION_CACHE": str(cache),
    }


def start(folder: Path, cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tasks.run_learner", "--run", str(folder)],
        cwd=ROOT,
        env=environment(cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def replay(folder: Path, cache: Path, step: int) -> str:
    command = [sys.executable, "-m", "tunix_core.console.cli", "replay", "--run", str(folder), "--step", str(step)]
    done = subprocess.run(command, cwd=ROOT, env=environment(cache), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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


def last_weights(folder: Path, num_steps: int) -> dict[str, np.ndarray]:
    return SnapshotStore(open_store(str(folder))).load(num_steps)

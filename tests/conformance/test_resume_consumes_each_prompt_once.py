"""Resume skipped hundreds of prompts, biased by length (NeMo-RL #3599, OpenRLHF #1322)."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.learner.processes import create, last_weights, run_to_end, start
from tests.learner.support import consumed_ids, write_shards
from tunix_core import paths
from tunix_core.storage.step_records import read_steps
from tunix_core.storage.store import open_store

NUM_KILLS = 20
GROUPS_PER_LIFE = 12
NUM_STEPS = 6 * (NUM_KILLS + 1)
"""Two groups each: a life may take six steps, then its data runs out."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_resume_consumes_each_prompt_once(tmp_path: Path) -> None:
    """kill -9 at 20 random points of the real process: the same trajectories, once each, and the same weights."""
    killed, whole, cache = tmp_path / "killed", tmp_path / "whole", tmp_path / "xla"
    for folder in (killed, whole):
        create(folder, NUM_STEPS, num_groups=0)
    store = open_store(str(killed))
    rng = np.random.default_rng(int(os.environ.get("TUNIX_TEST_SEED", "0")))
    for life in range(NUM_KILLS):
        write_shards(store, GROUPS_PER_LIFE, first=GROUPS_PER_LIFE * life, incarnation=f"b{life}")
        # Before or in the replay, in steps, between them, while a checkpoint is written, after them.
        awaited = len(read_steps(store, 0)) + int(rng.integers(0, 7))
        process = start(killed, cache)
        deadline = time.monotonic() + 240
        while awaited and not (killed / paths.step(awaited)).exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(float(rng.exponential(2.0 if rng.random() < 0.3 else 0.02)))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
    write_shards(store, GROUPS_PER_LIFE + 3, first=GROUPS_PER_LIFE * NUM_KILLS, incarnation="last")
    run_to_end(killed, cache)
    records = read_steps(store, 0)
    assert [record["clock"] for record in records] == list(range(1, NUM_STEPS + 1))
    assert len({record["incarnation"] for record in records}) >= NUM_KILLS // 2, "kills must have struck in training"
    consumed = consumed_ids(records)
    assert len(consumed) == len(set(consumed)) == 4 * NUM_STEPS

    for name in ("steps", "trajectories", "writers"):
        shutil.copytree(killed / name, whole / name, dirs_exist_ok=True)
    run_to_end(whole, cache)
    assert consumed_ids(read_steps(open_store(str(whole)), 0)) == consumed
    expected, received = last_weights(whole, NUM_STEPS), last_weights(killed, NUM_STEPS)
    for name in expected:
        assert received[name].tobytes() == expected[name].tobytes(), name

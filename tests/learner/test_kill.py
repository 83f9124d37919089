"""The real process, killed with SIGKILL in mid-run: the heart of the recovery promise."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.learner.processes import create, end_at, last_weights, replay, run_to_end, start, tiny_config
from tests.learner.support import consumed_ids
from tunix_core.errors import EXIT_INTERRUPTED
from tunix_core.storage.control import read_heartbeat, read_stop
from tunix_core.storage.run_directory import create_run
from tunix_core.storage.snapshots import SnapshotStore
from tunix_core.storage.step_records import read_steps
from tunix_core.storage.store import open_store

NUM_STEPS = 16


@pytest.mark.timeout(900)  # six processes that start JAX; seconds on an idle machine
def test_killed_twice_and_interrupted_once_equals_an_uninterrupted_run(tmp_path: Path, cache: Path) -> None:
    """Final parameters to the bit, every row once, the ledger to the token."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    create(killed, NUM_STEPS)
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
    expected, received = (last_weights(folder, NUM_STEPS) for folder in (whole, killed))
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
    assert f"identical to version {NUM_STEPS}, to the bit" in replay(killed, cache, NUM_STEPS)


def test_a_run_without_policy_zero_says_so(tmp_path: Path, cache: Path) -> None:
    create_run(open_store(str(tmp_path)), tiny_config(NUM_STEPS), run_id="tiny")
    process = start(tmp_path, cache)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 74, output
    assert "policies/00000000" in output
    assert "Traceback" not in output

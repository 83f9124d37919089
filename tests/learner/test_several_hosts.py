"""The learner as two and as four real processes: same parameters as one, each its own data, exact after a kill."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.learner.gangs import Gang, create, difference, gang_config, weights
from tests.learner.support import consumed_ids
from tunix_core import paths
from tunix_core.config import RunConfig
from tunix_core.data.packing import PackedArrays
from tunix_core.data.rows import RowFetcher
from tunix_core.data.sharing import feed_of_shard
from tunix_core.errors import EXIT_INTERRUPTED, is_retryable
from tunix_core.learner.batches import batch_of_record
from tunix_core.storage import tensor_files
from tunix_core.storage.checkpoints import CheckpointStore
from tunix_core.storage.control import read_heartbeats
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.run_directory import create_run
from tunix_core.storage.store import open_store

pytestmark = pytest.mark.timeout(1200)  # processes that compile, on machines that do other things too

LEAVE_WITHIN_SECONDS = 120
"""Of a survivor, on a busy machine: it gives a peer up after ten, then its process ends."""


@dataclasses.dataclass(frozen=True)
class Story:
    """What became of a run."""

    config: RunConfig
    folder: Path
    whole: Path
    """The same step records, executed by one process in one life."""
    gangs: list[Gang]
    deaths: list[tuple[list[int], float]]

    @property
    def num_steps(self) -> int:
        return self.config.learner.num_steps

    def records(self) -> list[dict[str, Any]]:
        return [json.loads((self.folder / paths.step(clock)).read_text()) for clock in range(1, self.num_steps + 1)]


def tell(folder: Path, cache: Path, config: RunConfig, lives: list[tuple[int, int, int | None]]) -> Story:
    """A run in several lives.

    Args:
        lives: of each the number of hosts, devices per host, and which host is killed once the life has written a
            checkpoint and begun the step after it; None: it goes on to the end.
    """
    killed, whole = folder / "killed", folder / "whole"
    create(killed, config, 4 * config.learner.num_steps + 6)
    shutil.copytree(killed, whole)
    gangs, deaths = [], []
    interval = config.checkpoint.interval_steps
    for num_hosts, devices, victim in lives:
        num_records = len(list((killed / paths.STEPS).glob("*"))) if gangs else 0
        clock = (num_records // interval + 1) * interval  # of the first checkpoint that this life writes
        gang = Gang(killed, cache, num_hosts, devices, step_seconds=0.0 if victim is None else 0.2)
        gangs.append(gang)
        try:
            if victim is None:
                gang.run_to_end()
            else:
                gang.until(killed / paths.checkpoint(clock) / paths.MANIFEST)
                gang.until_step(clock + 1)
                deaths.append(gang.kill(victim))
        finally:
            gang.end()
    shutil.copytree(killed / "steps", whole / "steps")
    Gang(whole, cache, 1, config.mesh.data * config.mesh.fsdp * config.mesh.stage * config.mesh.tensor).run_to_end()
    return Story(config, killed, whole, gangs, deaths)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Story:
    """Two hosts, one of them killed; then one host with both devices, killed; then two again."""
    config = gang_config(16, {"data": 2})
    return tell(tmp_path_factory.mktemp("two"), cache, config, [(2, 1, 1), (1, 2, 0), (2, 1, None)])


def test_killed_and_resumed_on_other_numbers_of_hosts_equals_one_process(two: Story) -> None:
    received, expected = weights(two.folder, two.num_steps), weights(two.whole, two.num_steps)
    for name in expected:
        np.testing.assert_array_equal(received[name], expected[name], err_msg=name)
    assert difference(weights(two.folder, 0), expected) > 1e-3
    assert "replayed steps 5 to" in two.gangs[1].output()


def test_survivors_leave_soon_with_a_code_worth_a_retry(two: Story) -> None:
    (codes, seconds), _ = two.deaths
    assert seconds < LEAVE_WITHIN_SECONDS
    assert codes[1] == -9
    assert is_retryable(codes[0]), two.gangs[0].output()


def test_every_trajectory_once_and_the_ledger_exact(two: Story) -> None:
    refs = consumed_ids(two.records())
    assert len(refs) == len(set(refs)) == 8 * two.num_steps
    for folder in (two.folder, two.whole):
        beats = read_heartbeats(open_store(str(folder)))
        for beat in beats.values():
            assert beat.progress["ledger_trajectories"] == {
                **dict.fromkeys(beat.progress["ledger_trajectories"], 0),
                "read": 8 * two.num_steps + 12,
                "consumed": 8 * two.num_steps,
                "surplus": 12,
            }
        assert beats["learner"].progress["num_hosts"] == len(beats)


def test_nothing_compiles_after_warm_up_on_any_host(two: Story) -> None:
    beats = read_heartbeats(open_store(str(two.folder)))
    assert {name: beat.progress["compilations_after_warmup"] for name, beat in beats.items()} == {
        "learner": 0,
        "learner-host-1": 0,
    }


def packed(story: Story) -> list[PackedArrays]:
    """All windows of every step, as one process packs them."""
    fetch = RowFetcher(open_store(str(story.folder)))
    return [batch_of_record(record, fetch, story.config).arrays for record in story.records()]


def test_a_host_reads_and_transfers_only_its_own_part(two: Story) -> None:
    """Shards of its feed, and windows of its devices: of each step the first life took, exactly those."""
    gang = two.gangs[0]
    read = [gang.lines(host, "read") for host in range(2)]
    for host in range(2):
        assert {feed_of_shard(key, 2) for key in read[host]} == {host}
    placed = [gang.lines(host, "put") for host in range(2)]
    windows: list[set[str]] = [set(), set()]
    for arrays in packed(two):
        for number, tokens in enumerate(arrays.tokens):
            if tokens.any():
                windows[number % 2].add(",".join(map(str, tokens.tolist())))
    assert not windows[0] & windows[1]
    for host in range(2):
        assert not placed[host] & windows[1 - host]
        assert len(placed[host] & windows[host]) >= 5
        # Of the batch that the kill kept from being committed: other groups went into that step.
        assert len(placed[host] - windows[host]) <= two.config.learner.max_windows


def test_hosts_that_wait_for_data_leave_when_one_dies(tmp_path: Path, cache: Path) -> None:
    """No collective runs that could fail: the coordination service notices."""
    config = gang_config(9, {"data": 2})
    create(tmp_path / "run", config, 9)
    gang = Gang(tmp_path / "run", cache, 2, 1)
    try:
        gang.until_step(2)
        codes, seconds = gang.kill(1)
    finally:
        gang.end()
    assert seconds < LEAVE_WITHIN_SECONDS
    assert is_retryable(codes[0]), gang.output()


def test_all_stop_behind_the_same_step_when_one_is_asked_to(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to SIGTERM: a checkpoint of that step, and a code that says so, on both.

    Their devices hold half of the parameters each, and each has read half of policy 0 and of the reference.
    """
    config = gang_config(40, {"fsdp": 2})
    monkeypatch.setattr(tensor_files, "BOX_BYTES", 256)
    create(tmp_path / "run", config, 166)
    gang = Gang(tmp_path / "run", cache, 2, 1, step_seconds=0.1)
    try:
        gang.until_step(2)
        gang.processes[1].terminate()
        assert gang.wait(120) == [EXIT_INTERRUPTED, EXIT_INTERRUPTED], gang.output()
    finally:
        gang.end()
    store = open_store(str(tmp_path / "run"))
    whole = sum(value.nbytes for value in PolicyStore(store).load(0)[0].values())
    for host in range(2):
        read = max(map(int, gang.lines(host, "weights")))
        assert whole <= read < 1.1 * whole, f"host {host} read {read} bytes of twice {whole}"
    clock = CheckpointStore(store).clocks()[-1]
    assert f"interrupted at clock {clock};" in gang.logs[0].read_text()
    assert f"interrupted at clock {clock};" in gang.logs[1].read_text()
    assert weights(tmp_path / "run", clock)


def test_a_host_that_ends_later_still_says_that_it_was_interrupted(tmp_path: Path, cache: Path) -> None:
    """The coordination service ends with host 0, and would take with it whoever has not yet left."""
    create_run(open_store(str(tmp_path / "run")), gang_config(9, {"data": 2}), run_id="gang")
    gang = Gang(tmp_path / "run", cache, 2, 1, module="interrupted_learner")
    assert gang.wait(120) == [EXIT_INTERRUPTED, EXIT_INTERRUPTED], gang.output()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Story:
    """Four hosts with a device each, tensor over pairs of them; host 3 is killed once."""
    config = gang_config(10, {"data": 2, "tensor": 2})
    return tell(tmp_path_factory.mktemp("four"), cache, config, [(4, 1, 3), (4, 1, None)])


@pytest.mark.meshes
def test_four_hosts_with_tensor_across_them_equal_one_process(four: Story) -> None:
    """Two hosts feed; the two others build the same windows from the record."""
    received, expected = weights(four.folder, four.num_steps), weights(four.whole, four.num_steps)
    for name in expected:
        np.testing.assert_array_equal(received[name], expected[name], err_msg=name)
    ((codes, seconds),) = four.deaths
    assert seconds < LEAVE_WITHIN_SECONDS
    assert all(is_retryable(code) for code in codes), four.gangs[0].output()
    refs = consumed_ids(four.records())
    assert len(refs) == len(set(refs)) == 8 * four.num_steps
    for host, others in ((0, 1), (2, 3)):
        assert four.gangs[1].lines(host, "put") == four.gangs[1].lines(others, "put")


@pytest.mark.meshes
def test_a_checkpoint_of_four_hosts_restores_on_another_mesh(four: Story, cache: Path) -> None:
    """fsdp 2, stage 2, on two hosts with two devices each: the last step again, to float32's tolerance."""
    folder = four.folder.parent / "other"
    shutil.copytree(four.folder, folder)
    run = json.loads((folder / paths.RUN).read_text())
    run["config"]["mesh"] |= {"data": 1, "fsdp": 2, "stage": 2, "tensor": 1}
    (folder / paths.RUN).write_text(json.dumps(run))
    (folder / paths.STOP).unlink()
    store = open_store(str(folder))
    checkpoints = CheckpointStore(store)
    assert checkpoints.clocks()[-1] == 10
    shutil.rmtree(folder / paths.checkpoint(10))
    shutil.rmtree(folder / paths.snapshot(10))
    Gang(folder, cache, 2, 2).run_to_end()
    assert difference(weights(folder, 10), weights(four.folder, 10)) < 1e-5

"""Whole lives of the learner on several hosts, each in a thread: they end together and tell the same."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.learner.support import NumpyTrainer, make_config, make_learner, open_run, write_shards
from tests.support.coordination import Service, on_all
from tunix_core import paths
from tunix_core.config import RunConfig
from tunix_core.distributed.hosts import Hosts, Share
from tunix_core.errors import Interrupted, ObjectMissing
from tunix_core.learner import checkpointing, recovery
from tunix_core.learner.loop import Learner
from tunix_core.storage.checkpoints import CheckpointStore
from tunix_core.storage.control import read_heartbeats
from tunix_core.storage.metrics_files import read_metrics
from tunix_core.storage.store import ObjectStore

SHARES = [
    Share(num_shards=2, own=(0,), feed=0, num_feeds=2),
    Share(num_shards=2, own=(0,), feed=0, num_feeds=2, leads=False),
    Share(num_shards=2, own=(1,), feed=1, num_feeds=2),
]
"""Three hosts: the second holds the same windows as the first."""
TWO = [SHARES[0], SHARES[2]]


class CountingTrainer(NumpyTrainer):
    """Its state, like that of a real one, follows from the whole batch, of which it sees but the denominator."""

    def step(
        self, state: Any, reference: Any, batch: Any, denominator: np.ndarray
    ) -> tuple[dict[str, Any], Mapping[str, Any]]:
        del reference
        self.batches.append(batch)
        weights = (state["weights"] * np.float32(0.999) + denominator.sum()).astype(np.float32)
        return {"weights": weights, "step": (state["step"] + 1).astype(np.int32)}, {"loss": 0.0, "nonfinite": 0.0}


def config(**overrides: Any) -> RunConfig:
    return make_config(**{"mesh.data": 2, "learner.groups_per_batch": 4, "learner.max_windows": 8, **overrides})


def gang(store: ObjectStore, run: RunConfig, shares: list[Share], **kwargs: Any) -> list[Learner]:
    service = Service()
    return [
        make_learner(
            store,
            run,
            trainer=CountingTrainer(),
            hosts=Hosts(index, len(shares), service),
            share=share,
            process="learner" if not index else f"learner-host-{index}",
            **kwargs,
        )
        for index, share in enumerate(shares)
    ]


def live(learners: list[Learner]) -> list[Any]:
    """What each raised; None for one that ended in peace, or did not end."""
    ended = [False] * len(learners)

    def run(hosts: Hosts) -> None:
        try:
            learners[hosts.index].run()
        finally:
            ended[hosts.index] = True

    found = on_all([learner._hosts for learner in learners], run)
    for learner in learners:
        learner._hosts.abandon()
    assert all(ended), "they wait for each other"
    return found


def test_hosts_that_stop_at_a_checkpoint_agree_that_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One host's write returns later than the other's: neither may begin another checkpoint alone."""
    store, run = open_run(tmp_path), config(**{"learner.num_steps": 9})
    write_shards(store, 8)
    saved, save = threading.Event(), checkpointing.save

    def slow_on_one(*args: Any, hosts: Hosts, **kwargs: Any) -> None:
        save(*args, hosts=hosts, **kwargs)
        if hosts.is_first:
            saved.set()
        else:
            threading.Event().wait(2)

    monkeypatch.setattr(checkpointing, "save", slow_on_one)
    found = live(gang(store, run, TWO, interrupted=saved.is_set))
    assert [type(error) for error in found] == [Interrupted, Interrupted]
    assert CheckpointStore(store).clocks() == [2]


def test_every_host_tells_of_the_whole_run(tmp_path: Path) -> None:
    """Also one that leads no feed: the ledger, what waits, what was put back. Only host 0 keeps rows of metrics.

    Two windows hold a feed's two groups of short trajectories, not those of long ones, of which one goes back.
    """
    store, run = open_run(tmp_path), config(**{"learner.num_steps": 3, "learner.max_windows": 4})
    write_shards(store, 20, longer=10)
    learners = gang(store, run, SHARES)
    follower, waiting = learners[1], [0]
    step = follower._step

    def watched(prepared: Any) -> None:
        step(prepared)
        deadline = time.monotonic() + 60  # until the others' next pulse
        while not waiting[-1] and time.monotonic() < deadline:
            waiting.append(follower.progress()["num_buffered_groups"])

    follower._step = watched  # type: ignore[method-assign]
    assert live(learners) == [None] * 3
    beats = {name: beat.progress for name, beat in read_heartbeats(store).items()}
    assert sorted(beats) == ["learner", "learner-host-1", "learner-host-2"]
    for beat in beats.values():
        ledger = beat["ledger_trajectories"]
        assert ledger == beats["learner"]["ledger_trajectories"]
        assert ledger["read"] == 40
        assert ledger["consumed"] + ledger["surplus"] == 40
        assert beat["num_buffered_groups"] == 0
        assert beat["totals"]["num_deferred_groups"] == 3 * 2
    assert waiting[-1] > 0
    assert [len(learner._observer._recorder) for learner in learners] == [0, 0, 0]
    assert read_metrics(store, "learner")["clock"].tolist() == [1, 2, 3, 3]


def write_records(store: ObjectStore, run: RunConfig, num_steps: int) -> None:
    """Of a first life, which ended without a checkpoint."""
    write_shards(store, 4 * num_steps)
    make_learner(store, dataclasses.replace(run, learner=dataclasses.replace(run.learner, num_steps=num_steps))).run()


def replayed(store: ObjectStore, run: RunConfig, hosts: Hosts) -> list[int]:
    share = TWO[hosts.index]
    buffer = make_learner(store, run, hosts=hosts, share=share)._buffer
    return list(recovery.replay(store, buffer, run, lambda *_: None, hosts, share))


def test_hosts_replay_as_many_records_as_host_0_counts(tmp_path: Path) -> None:
    """A learner that was thought dead commits its last record after one host has looked, before host 0 does."""
    store, run = open_run(tmp_path), config()
    write_records(store, run, 3)
    last = store.get(paths.step(3))
    store.delete(paths.step(3))
    service = Service()

    def resume(hosts: Hosts) -> list[int]:
        if hosts.is_first:
            threading.Event().wait(0.5)
            store.put(paths.step(3), last)
        return replayed(store, run, hosts)

    assert on_all([Hosts(index, 2, service) for index in range(2)], resume) == [[1, 2, 3]] * 2


def test_a_record_committed_after_host_0_has_counted_is_replayed_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, run = open_run(tmp_path), config()
    write_records(store, run, 3)
    last = store.get(paths.step(3))
    store.delete(paths.step(3))
    read, looked = recovery.read_steps, threading.Event()

    def late(store: ObjectStore, clock: int) -> Any:
        if looked.is_set():  # host 0 has
            store.put(paths.step(3), last)
        looked.set()
        return read(store, clock)

    monkeypatch.setattr(recovery, "read_steps", late)
    service = Service()
    found = on_all([Hosts(index, 2, service) for index in range(2)], lambda hosts: replayed(store, run, hosts))
    assert found == [[1, 2]] * 2


def test_a_host_that_finds_fewer_records_than_host_0_says_so(tmp_path: Path) -> None:
    store, run = open_run(tmp_path), config()
    write_records(store, run, 2)
    service = Service()

    def resume(hosts: Hosts) -> list[int]:
        return hosts.lead("replay", None, lambda _: 3) and [] if hosts.is_first else replayed(store, run, hosts)

    _, error = on_all([Hosts(index, 2, service) for index in range(2)], resume)
    assert isinstance(error, ObjectMissing)
    assert "3" in str(error)

"""Two feeds prepare one batch: both go on or neither, one record names both parts, any number of hosts rebuilds it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.support import centered, make_group
from tests.learner.support import NumpyTrainer, make_config, open_run
from tests.support.coordination import Service, on_all
from tunix_core.config import RunConfig
from tunix_core.data.buffer import ReplayBuffer
from tunix_core.data.ingestion import Ingestion
from tunix_core.data.packing import window_sizes
from tunix_core.data.rows import RowFetcher, Rows
from tunix_core.data.sharing import ownership
from tunix_core.distributed.hosts import Hosts, Share
from tunix_core.errors import ConfigError
from tunix_core.learner.batches import Figures, batch_of_record
from tunix_core.learner.loop import check_feeds
from tunix_core.learner.pipeline import Prepared, Preparer
from tunix_core.paths import parse_shard
from tunix_core.storage.step_records import read_steps
from tunix_core.storage.store import ObjectStore
from tunix_core.storage.trajectory_writer import TrajectoryWriter

SHARES = [
    Share(num_shards=2, own=(0,), feed=0, num_feeds=2),
    Share(num_shards=2, own=(0,), feed=0, num_feeds=2, leads=False),
    Share(num_shards=2, own=(1,), feed=1, num_feeds=2),
]
"""Three hosts: the second holds the same windows as the first."""


def config(**overrides: Any) -> RunConfig:
    return make_config(
        **{"mesh.data": 2, "learner.groups_per_batch": 4, "learner.max_windows": 8, "learner.num_steps": 9, **overrides}
    )


def _of_some_size(rows: Rows, members: np.ndarray) -> np.ndarray:
    """Other advantages in each shard, so that a feed's spread is not the batch's."""
    return centered(rows, members) * (1 + parse_shard(rows.shard).sequence)


class Side:
    """One host up to its preparer."""

    def __init__(self, store: ObjectStore, run: RunConfig, hosts: Hosts, share: Share) -> None:
        self.hosts, self.share, self.stop_asked = hosts, share, False
        self.buffer = ReplayBuffer(
            group_advantages=_of_some_size,
            window_tokens=run.learner.window_tokens,
            max_staleness=run.staleness.max_staleness,
            buffer_bytes=2**20,
            feed=share.feed,
            num_feeds=share.num_feeds,
        )
        owns = ownership(share.feed, share.num_feeds)
        self.ingestion = Ingestion(store, self.buffer, vocab_size=64, owns=owns)
        self.preparer = Preparer(
            store,
            run,
            self.buffer,
            NumpyTrainer(),
            window_sizes(run),
            incarnation="gang",
            hosts=hosts,
            share=share,
            stop_asked=lambda: self.stop_asked,
            snapshot_wanted=lambda: hosts.is_first,
        )

    def attempt(self, clock: int) -> Prepared | None:
        if self.share.leads:
            self.ingestion.poll()
        return self.preparer.attempt(clock, threading.Event())


def sides(store: ObjectStore, run: RunConfig) -> list[Side]:
    service = Service()
    return [Side(store, run, Hosts(index, 3, service), share) for index, share in enumerate(SHARES)]


def attempts(all_sides: list[Side], clock: int) -> list[Any]:
    return on_all([side.hosts for side in all_sides], lambda hosts: all_sides[hosts.index].attempt(clock))


def write(store: ObjectStore, num_shards: int, *, version: int = 0, incarnation: str = "a0") -> None:
    writer = TrajectoryWriter(store, actor_id="actor", incarnation=incarnation)
    for number in range(num_shards):
        names = [f"{incarnation}-{number}-{i}" for i in range(2)]
        lengths = [8 + number % 7, 9 + number % 6]
        writer.write([t for name in names for t in make_group(name, version=version, lengths=lengths)])
    writer.close()


@pytest.mark.parametrize("advantage", ["grpo", "reinforce_pp"])
def test_two_feeds_make_one_batch(tmp_path: Path, advantage: str) -> None:
    """To the bit that of one process; also where advantages are normalised over the episodes of the batch."""
    store, run = open_run(tmp_path), config(**{"algorithm.advantage": advantage})
    write(store, 4)
    hosts = sides(store, run)
    assert attempts(hosts, 0) == [None] * 3, "the first round tells the others what there is"
    assert [side.preparer.snapshot_clock for side in hosts] == [0] * 3
    for clock in range(2):
        made = attempts(hosts, clock)
        (record,) = read_steps(store, clock)
        whole = batch_of_record(record, RowFetcher(store), run)
        assert len(record["groups"]) == 4
        if advantage == "reinforce_pp":
            every = [value for group in record["groups"] for value in group["advantages"]]
            assert record["advantage_statistics"] == [np.mean(every), np.std(every)]
            assert np.std(every[:4]) != pytest.approx(np.std(every), rel=0.05), "a feed alone would find others"
        for number in (0, 1):  # row i of the batch lies on shard i mod 2
            own = made[2 * number].host
            for name, array in own.arrays._asdict().items():
                if array is not None:
                    np.testing.assert_array_equal(array, getattr(whole.arrays, name)[number::2], err_msg=name)
        for name, array in made[0].host.arrays._asdict().items():
            np.testing.assert_array_equal(made[1].host.arrays._asdict()[name], array)
        for batch in made:
            np.testing.assert_array_equal(batch.host.denominator, whole.denominator)
            assert batch.host.figures.lengths.tolist() == whole.figures.lengths.tolist()
            assert batch.host.num_windows == whole.num_windows
        for side, batch in zip(hosts, made, strict=True):
            if side.share.leads:
                side.buffer.consume(batch.host.groups, clock)
            side.buffer.advance(clock + 1)


def test_a_feed_without_enough_keeps_all_waiting(tmp_path: Path) -> None:
    store, run = open_run(tmp_path), config()
    write(store, 1)
    hosts = sides(store, run)
    for _ in range(3):
        assert attempts(hosts, 0) == [None] * 3
    assert {side.preparer.state for side in hosts} == {"waiting"}
    assert sorted(side.buffer.num_fresh(0) for side in hosts) == [0, 0, 2]
    assert all(side.buffer.num_reserved() == 0 for side in hosts)


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_all_stop_when_one_is_asked_to(tmp_path: Path, asked: int) -> None:
    store, run = open_run(tmp_path), config()
    write(store, 4)
    hosts = sides(store, run)
    attempts(hosts, 0)
    hosts[asked].stop_asked = True
    assert attempts(hosts, 0) == [None] * 3
    assert all(side.preparer.stopped for side in hosts)
    assert all(side.buffer.num_reserved() == 0 for side in hosts)
    assert read_steps(store, 0) == []


def test_one_feed_over_the_mean_staleness_throttles_all_and_host_0_overrides(tmp_path: Path) -> None:
    limits = {"staleness.max_mean_staleness": 2.0, "staleness.max_throttle_seconds": 0.2}
    store, run = open_run(tmp_path), config(**limits)
    write(store, 4)
    hosts = sides(store, run)
    for side in hosts:
        side.buffer.advance(3)
    attempts(hosts, 3)
    assert attempts(hosts, 3) == [None] * 3
    assert {side.preparer.state for side in hosts} == {"throttled"}
    made: list[Any] = [None]
    while made[0] is None:
        made = attempts(hosts, 3)
    assert [batch.override for batch in made] == [True] * 3
    assert read_steps(store, 3)[0]["throttle_override"] is True


@pytest.mark.parametrize("advantage", ["grpo", "reinforce_pp"])
@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_a_record_is_rebuilt_by_any_number_of_hosts(tmp_path: Path, num_hosts: int, advantage: str) -> None:
    """Of four window shards: the parts put together are the batch, and no host reads a shard that it needs nothing of."""
    store, run = open_run(tmp_path), config(**{"mesh.data": 4, "algorithm.advantage": advantage})
    write(store, 4)
    one = Side(store, run, Hosts(), Share(num_shards=4, own=(0, 1, 2, 3)))
    batch = one.attempt(0)
    assert batch is not None
    (record,) = read_steps(store, 0)
    per_host = 4 // num_hosts
    parts = []
    for host in range(num_hosts):
        own = tuple(range(host * per_host, (host + 1) * per_host))
        share = Share(num_shards=4, own=own, feed=host, num_feeds=num_hosts)
        found: list[Any] = []

        def complete(part: Any, found: list[Any] = found) -> Any:
            found.append(part)
            return part.completed([batch.host.figures.to_json()])

        rebuilt = batch_of_record(record, RowFetcher(store), run, share, complete)
        parts.append(found[0].figures.to_json())
        rows = share.global_windows(np.arange(share.num_own(batch.host.num_windows)))
        for name, array in rebuilt.arrays._asdict().items():
            if array is not None:
                np.testing.assert_array_equal(array, getattr(batch.host.arrays, name)[rows], err_msg=name)
    total = Figures.total(parts)
    assert total.counts.tolist() == batch.host.figures.counts.tolist()
    assert sorted(total.lengths.tolist()) == sorted(batch.host.figures.lengths.tolist())


def test_what_feeds_cannot_share_out_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.groups_per_batch"):
        check_feeds(config(**{"learner.groups_per_batch": 3}), SHARES[0])

"""Feeds: every shard is one's, a group that two delivered is trained on once, states go to any number of feeds."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.support import centered, make_group, make_rows
from tunix_core import paths
from tunix_core.data.buffer import ReplayBuffer
from tunix_core.data.groups import Group
from tunix_core.data.ingestion import Ingestion
from tunix_core.data.ledger import Ledger
from tunix_core.data.rows import RowFetcher, Rows
from tunix_core.data.sharing import dealt, feed_of, feed_of_shard, ownership
from tunix_core.storage.store import ObjectStore, open_store
from tunix_core.storage.trajectory_writer import TrajectoryWriter
from tunix_core.storage.writers import fence_incarnation


def make_buffer(feed: int, num_feeds: int) -> ReplayBuffer:
    return ReplayBuffer(
        group_advantages=centered,
        window_tokens=32,
        max_staleness=100,
        buffer_bytes=2**20,
        feed=feed,
        num_feeds=num_feeds,
    )


def shard(incarnation: str, sequence: int) -> str:
    return paths.ShardName("date=2026-01-01/hour=00", "actor", incarnation, sequence).key


def agree(buffers: list[ReplayBuffer]) -> None:
    told = [buffer.announce() for buffer in buffers]
    for buffer in buffers:
        buffer.settle(told)


def waiting(buffer: ReplayBuffer) -> list[str]:
    if not buffer.num_fresh(0):
        return []
    groups = buffer.take(buffer.num_fresh(0), 0, max_mean_staleness=math.inf).groups
    assert groups is not None
    buffer.put_back(groups)
    return sorted(group.group_id for group in groups)


@pytest.mark.parametrize("num_feeds", [1, 2, 3, 8])
def test_a_writers_shards_go_to_the_feeds_in_turn(num_feeds: int) -> None:
    feeds = [feed_of("0123abcd", sequence, num_feeds) for sequence in range(4 * num_feeds)]
    assert sorted(feeds) == sorted([*range(num_feeds)] * 4)
    assert feeds[:num_feeds] == feeds[num_feeds : 2 * num_feeds]
    starts = {feed_of(f"writer{n}", 0, num_feeds) for n in range(100)}
    assert starts == set(range(num_feeds))


# ---- a group that came to two feeds ----------------------------------------------------------------


def test_of_a_group_announced_in_one_round_the_lower_feeds_stays() -> None:
    buffers = [make_buffer(feed, 2) for feed in range(2)]
    for feed, buffer in enumerate(buffers):
        name = f"a{feed}"
        groups = [*make_group("both", incarnation=name), *make_group(f"own{feed}", incarnation=name)]
        buffer.add(make_rows(f"s{feed}", groups))
        assert buffer.take(1, 0, max_mean_staleness=math.inf).groups is None, "nothing is taken that others do not know"
    agree(buffers)
    assert [waiting(buffer) for buffer in buffers] == [["both", "own0"], ["own1"]]
    assert [buffer.ledger.trajectories()["duplicate"] for buffer in buffers] == [0, 2]
    assert all(buffer.ledger.balanced for buffer in buffers)


def test_what_was_announced_before_stays_and_what_comes_later_is_a_duplicate() -> None:
    buffers = [make_buffer(feed, 2) for feed in range(2)]
    buffers[1].add(make_rows("s1", make_group("g", incarnation="a1")))
    told = [buffer.announce() for buffer in buffers]
    buffers[0].add(make_rows("s0", make_group("g", incarnation="a0")))  # before it hears of the other
    for buffer in buffers:
        buffer.settle(told)
    agree(buffers)
    assert [waiting(buffer) for buffer in buffers] == [[], ["g"]]
    buffers[0].add(make_rows("s2", make_group("g", incarnation="a2")))
    assert buffers[0].ledger.trajectories()["duplicate"] == 4


def test_of_a_group_that_two_announce_in_one_round_the_third_feed_knows_the_one_that_stays() -> None:
    """Rows of the winner that are delivered again are known by their content, those of the loser are another's."""
    buffers = [make_buffer(feed, 3) for feed in range(3)]
    for feed in range(2):
        buffers[feed].add(make_rows(f"s{feed}", make_group("g", incarnation=f"a{feed}")))
    agree(buffers)
    for buffer in buffers:
        assert [buffer._seen.is_reissued("g", f"a{feed}") for feed in range(2)] == [False, True]


# ---- states --------------------------------------------------------------------------------------


def write(store: ObjectStore, incarnation: str, num_shards: int, *, close: bool = False) -> TrajectoryWriter:
    writer = TrajectoryWriter(store, actor_id="actor_0_0", incarnation=incarnation)
    for number in range(num_shards):
        writer.write(make_group(f"{incarnation}-{number:03d}"))
    if close:
        writer.close()
    return writer


def read(store: ObjectStore, buffer: ReplayBuffer, feed: int, num_feeds: int, polls: int, per_poll: int = 64) -> None:
    ingestion = Ingestion(store, buffer, vocab_size=64, max_shards=per_poll, owns=ownership(feed, num_feeds))
    for _ in range(polls):
        ingestion.poll()


def resumed(store: ObjectStore, buffers: list[ReplayBuffer], num_feeds: int) -> list[ReplayBuffer]:
    """The buffers of another number of feeds, from what these saved."""
    saved = [buffer.state() for buffer in buffers]
    seen = {name: np.concatenate([arrays[name] for _, arrays in saved]) for name in saved[0][1]}
    found = []
    for feed in range(num_feeds):
        buffer = make_buffer(feed, num_feeds)
        assert buffer.restore(dealt([values for values, _ in saved], feed, num_feeds), seen, RowFetcher(store)) == {}
        found.append(buffer)
    return found


def total(buffers: list[ReplayBuffer]) -> dict[str, int]:
    return Ledger.total([buffer.ledger.state() for buffer in buffers]).trajectories()


@pytest.mark.parametrize("num_feeds", [[1, 2, 1], [2, 3, 2], [3, 1, 4], [2, 2, 2]])
def test_every_shard_is_read_once_through_changes_of_the_number_of_feeds(tmp_path: Path, num_feeds: list[int]) -> None:
    """They stop at different places, more comes meanwhile, one writer is fenced."""
    store = open_store(str(tmp_path))
    write(store, "a0", 9, close=True)
    writer = write(store, "a1", 7)
    buffers = [make_buffer(feed, num_feeds[0]) for feed in range(num_feeds[0])]
    for feed, buffer in enumerate(buffers):
        read(store, buffer, feed, num_feeds[0], polls=feed + 1, per_poll=2)
    for count in num_feeds[1:]:
        before = total(buffers)
        buffers = resumed(store, buffers, count)
        assert total(buffers) == before
        for feed, buffer in enumerate(buffers):
            assert buffer.ledger.balanced
            assert {feed_of_shard(g["shard"], count) for g in buffer.state()[0]["groups"]} <= {feed}
            read(store, buffer, feed, count, polls=feed + 1, per_poll=2)
    writer.write(make_group("a1-late"))
    fence_incarnation(store, "a1")
    for feed, buffer in enumerate(buffers):
        read(store, buffer, feed, num_feeds[-1], polls=40)
    assert total(buffers)["read"] == total(buffers)["buffered"] == 2 * (9 + 8)
    names = [entry["group_id"] for buffer in buffers for entry in buffer.state()[0]["groups"]]
    assert len(names) == len(set(names)) == 17
    cursors: list[dict[str, Any]] = [buffer.cursors["cursors"] for buffer in buffers if buffer.cursors]
    assert all(cursor["closed"] for own in cursors for cursor in own.values()), "closed writers cost nothing"


def delivered_by(feed: int) -> Rows:
    """Group `g` as played for that one of two feeds, in a shard that it reads."""
    sequence = next(n for n in range(2) if feed_of(f"a{feed}", n, 2) == feed)
    group = make_group("g", incarnation=f"a{feed}", content=feed)
    return make_rows(shard(f"a{feed}", sequence), group)


@pytest.mark.parametrize("arrivals", list(itertools.product(range(3), repeat=2)))
def test_a_group_that_two_feeds_deliver_is_trained_on_once_whenever_each_of_them_is_saved(
    arrivals: tuple[int, int],
) -> None:
    """Feeds save at one clock but not in one moment of a round. The record names the rows that stayed in the first life.

    Args:
        arrivals: of each feed: before the first round, in it, or behind it.
    """
    buffers, shards = [make_buffer(feed, 2) for feed in range(2)], [delivered_by(feed) for feed in range(2)]
    moments: list[list[Any]] = [[], []]

    def pass_on(moment: int) -> None:
        for feed, buffer in enumerate(buffers):
            moments[feed].append((buffer.state(), moment > arrivals[feed]))
            if moment == arrivals[feed]:
                buffer.add(shards[feed])
                moments[feed].append((buffer.state(), True))

    for moment in range(0, 4, 2):
        pass_on(moment)
        told = [buffer.announce() for buffer in buffers]
        pass_on(moment + 1)
        for buffer in buffers:
            buffer.settle(told)
    pass_on(4)
    (recorded,) = [rows for rows, buffer in zip(shards, buffers, strict=True) if waiting(buffer)]
    for saved, num_feeds in itertools.product(itertools.product(*moments), (1, 2, 3)):
        seen = {name: np.concatenate([arrays[name] for (_, arrays), _ in saved]) for name in saved[0][0][1]}
        again = [make_buffer(feed, num_feeds) for feed in range(num_feeds)]
        for feed, buffer in enumerate(again):
            state = dealt([values for (values, _), _ in saved], feed, num_feeds)
            buffer.restore(state, seen, lambda refs: next(rows for rows in shards if rows.shard == refs[0].shard))
            if feed_of_shard(recorded.shard, num_feeds) == feed:
                entry = Group(
                    group_id="g",
                    rows=recorded,
                    advantages=np.zeros(2, np.float32),
                    arrival=0,
                    num_bytes=recorded.num_bytes,
                )
                buffer.consume_again(entry)
            else:
                buffer.note_delivered("g", recorded.incarnation)
        for rows, (_, is_read) in zip(shards, saved, strict=True):
            if not is_read:
                again[feed_of_shard(rows.shard, num_feeds)].add(rows)
        agree(again)
        assert all(buffer.ledger.balanced for buffer in again)
        nothing = dict.fromkeys(total(again), 0)
        assert total(again) == nothing | {"read": 4, "consumed": 2, "duplicate": 2}
        assert [waiting(buffer) for buffer in again] == [[]] * num_feeds


def test_a_saved_group_that_two_feeds_hold_is_the_ones_that_wins_when_they_agree() -> None:
    """What was there for an earlier round wins, whether the round had begun or not; else the lower feed's."""
    states = [[], []]
    for feed in range(2):
        for late in (False, True):
            buffer = make_buffer(feed, 2)
            if late:
                buffer.announce()
            buffer.add(delivered_by(feed))
            states[feed].append(buffer.state()[0])
            buffer.announce()
            states[feed].append(buffer.state()[0])
    for (first, a), (second, b) in itertools.product(enumerate(states[0]), enumerate(states[1])):
        after = [dealt([a, b], feed, 2) for feed in range(2)]
        wins = int(first // 2 > second // 2)
        assert [len(state["groups"]) for state in after] == [1 - wins, wins]
        counts = Ledger.total([state["ledger"] for state in after]).trajectories()
        assert (counts["read"], counts["buffered"], counts["duplicate"]) == (4, 2, 2)

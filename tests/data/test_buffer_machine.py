"""Any order of deliveries, steps, crashes and recoveries: the ledger is exact, nothing is trained on twice or lost."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.data.support import make_group, make_rows
from tests.data.test_buffer import fetch, make_buffer
from tunix_core.data.buffer import ReplayBuffer, group_state
from tunix_core.data.rows import Rows
from tunix_core.types import RowRef

BOUND = 2


class BufferMachine(RuleBasedStateMachine):
    """The model: the shards as delivered, the step records, and the last checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer: ReplayBuffer = make_buffer(max_staleness=BOUND, buffer_bytes=4000)
        self.shards: dict[str, Rows] = {}
        self.unread: list[str] = []
        self.records: list[list[dict[str, Any]]] = []
        self.prepared: list[Any] = []
        self.num_groups = 0
        self.checkpoint: tuple[Any, set[str]] = (self.buffer.state(), set())
        """State, and the shards its cursors have passed."""

    @rule(
        versions=st.lists(st.integers(0, 3), min_size=1, max_size=4),
        longest=st.sampled_from([12, 12, 12, 20]),
        fault=st.sampled_from([None, None, 0, 1]),
    )
    def write_shard(self, versions: list[int], longest: int, fault: int | None) -> None:
        trajectories = []
        for age in versions:
            version = max(0, self.buffer.clock - age)
            trajectories += make_group(f"g{self.num_groups}", size=3, version=version, lengths=[longest, 6, 9])
            self.num_groups += 1
        self._write(trajectories, {} if fault is None else {fault: "broken"})

    @precondition(lambda self: self.num_groups)
    @rule(data=st.data(), content=st.sampled_from([0, 0, 1]), incarnation=st.sampled_from(["a0", "a1"]))
    def write_again(self, data: st.DataObject, content: int, incarnation: str) -> None:
        group = data.draw(st.integers(0, self.num_groups - 1))
        self._write(make_group(f"g{group}", size=3, lengths=[12, 6, 9], content=content, incarnation=incarnation), {})

    def _write(self, trajectories: list[Any], faults: dict[int, str]) -> None:
        key = f"s{len(self.shards)}"
        self.shards[key] = make_rows(key, trajectories, faults=faults)
        self.unread.append(key)

    @precondition(lambda self: self.unread)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        key = self.unread.pop(data.draw(st.integers(0, len(self.unread) - 1)))
        self.buffer.add(self.shards[key])

    @precondition(lambda self: not self.prepared)
    @rule(num_groups=st.integers(1, 3), limit=st.sampled_from([1.0, math.inf]))
    def prepare(self, num_groups: int, limit: float) -> None:
        taken = self.buffer.take(num_groups, self.buffer.clock, max_mean_staleness=limit)
        self.prepared = taken.groups or []
        assert not self.prepared or taken.mean_staleness <= limit

    @precondition(lambda self: self.prepared)
    @rule()
    def put_back(self) -> None:
        self.buffer.put_back(self.prepared)
        self.prepared = []

    @precondition(lambda self: self.prepared)
    @rule()
    def step(self) -> None:
        for group in self.prepared:
            assert self.buffer.clock - group.version_min <= BOUND
        self.records.append([group_state(g) for g in self.prepared])
        self.buffer.consume(self.prepared, self.buffer.clock)
        self.prepared = []
        self.buffer.advance(self.buffer.clock + 1)

    @rule()
    def save(self) -> None:
        self.checkpoint = (copy.deepcopy(self.buffer.state()), set(self.shards) - set(self.unread))

    @rule()
    def crash_and_recover(self) -> None:
        (values, arrays), passed = self.checkpoint
        self.buffer = make_buffer(max_staleness=BOUND, buffer_bytes=4000)
        self.buffer.restore(values, arrays, lambda refs: fetch(self.shards, refs))
        for record in self.records[values["clock"] :]:
            for entry in record:
                refs = [RowRef(shard=entry["shard"], row=row) for row in entry["rows"]]
                self.buffer.consume_again(fetch(self.shards, refs), entry["group_id"])
            self.buffer.advance(self.buffer.clock + 1)
        self.unread = [key for key in self.shards if key not in passed]
        self.prepared = []

    @invariant()
    def identity_holds(self) -> None:
        assert self.buffer.ledger.balanced
        held = [*self.buffer._waiting.values(), *self.buffer._reserved.values()]
        assert self.buffer.ledger.tokens()["buffered"] == sum(int(g.rows.lengths.sum()) for g in held)
        assert self.buffer._bytes == sum(g.num_bytes for g in held)

    @invariant()
    def nothing_is_consumed_twice(self) -> None:
        ids = [
            self.shards[entry["shard"]].trajectory_ids[row]
            for record in self.records
            for entry in record
            for row in entry["rows"]
        ]
        assert len(ids) == len(set(ids))
        consumed = sum(sum(entry["lengths"]) for record in self.records for entry in record)
        assert self.buffer.ledger.tokens()["consumed"] == consumed

    @invariant()
    def everything_delivered_is_read_once(self) -> None:
        delivered = sum(int(self.shards[key].lengths.sum()) for key in self.shards if key not in self.unread)
        ahead = set(self.buffer._replayed)
        early = sum(int(self.shards[key].lengths[row]) for key, row in ahead)
        assert all(key in self.unread for key, _ in ahead)
        assert self.buffer.ledger.tokens()["read"] == delivered + early


TestBufferMachine = BufferMachine.TestCase
TestBufferMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_the_machine_reaches_recovery_ahead_of_the_reader() -> None:
    """The interesting path, by hand: the step record names rows that the restored reader has not reached."""
    shards = {"s0": make_rows("s0", make_group("a", size=3, lengths=[12, 20, 9]), faults={})}
    buffer = make_buffer()
    checkpoint = buffer.state()
    buffer.add(shards["s0"])
    groups = buffer.take(1, 0, max_mean_staleness=math.inf).groups
    record = [group_state(g) for g in groups]
    buffer.consume(groups, 0)
    buffer.advance(1)
    again = make_buffer()
    again.restore(*checkpoint, lambda refs: fetch(shards, refs))
    for entry in record:
        again.consume_again(shards["s0"].take(np.array(entry["rows"])), entry["group_id"])
    again.advance(1)
    assert again.ledger.tokens()["consumed"] == 21
    again.add(make_rows("s1", make_group("a", size=3, lengths=[12, 20, 9])))  # a duplicate arrives before the shard
    again.add(shards["s0"])
    assert again.ledger.tokens() == buffer.ledger.tokens() | {"read": 82, "duplicate": 41}
    assert again.ledger.tokens()["overlong"] == 20

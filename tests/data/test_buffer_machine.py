"""Any order of deliveries, steps, crashes and recoveries: the ledger is exact, nothing is trained on twice or lost."""

from __future__ import annotations

import collections
import copy
import functools
import math
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.data.support import make_group, make_rows
from tests.data.test_buffer import fetch, make_buffer
from tunix_core.data.buffer import ReplayBuffer, group_state
from tunix_core.data.rows import Rows
from tunix_core.learner.batches import group_of_record

BOUND = 2


class BufferMachine(RuleBasedStateMachine):
    """The model: the shards as delivered, the step records, and the last checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.make = functools.partial(make_buffer, max_staleness=BOUND, buffer_bytes=4000)
        self.buffer: ReplayBuffer = self.make()
        self.max_reuse = 1
        self.shards: dict[str, Rows] = {}
        self.unread: list[str] = []
        self.records: list[list[dict[str, Any]]] = []
        self.prepared: list[Any] = []
        self.num_groups = 0
        self.checkpoint: tuple[Any, set[str]] = (self.buffer.state(), set())
        """State, and the shards its cursors have passed."""

    @initialize(
        order=st.sampled_from(["oldest_first", "freshest_first", "largest_advantage_first"]),
        max_reuse=st.integers(1, BOUND + 1),
        filter_zero_signal=st.booleans(),
        buffer_bytes=st.sampled_from([2000, 4000, 2**20]),
    )
    def choose_options(self, max_reuse: int, **options: Any) -> None:
        self.max_reuse = max_reuse
        self.make = functools.partial(make_buffer, max_staleness=BOUND, max_reuse=max_reuse, **options)
        self.buffer = self.make()

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
        self.buffer = self.make()
        self.buffer.restore(values, arrays, lambda refs: fetch(self.shards, refs))
        assert self.buffer.state()[0] == values
        for record in self.records[values["clock"] :]:
            for entry in record:
                self.buffer.consume_again(group_of_record(entry, lambda refs: fetch(self.shards, refs)))
            self.buffer.advance(self.buffer.clock + 1)
        self.unread = [key for key in self.shards if key not in passed]
        self.prepared = []

    @invariant()
    def identity_holds(self) -> None:
        assert self.buffer.ledger.balanced
        held = [*self.buffer._waiting.values(), *self.buffer._reserved.values()]
        assert self.buffer.ledger.tokens()["buffered"] == sum(int(g.rows.lengths.sum()) for g in held if not g.uses)
        assert all(g.uses < self.max_reuse for g in held)
        assert self.buffer._bytes == sum(g.num_bytes for g in held)

    @invariant()
    def nothing_is_consumed_more_often_than_allowed(self) -> None:
        uses = collections.Counter[str]()
        tokens = {True: 0, False: 0}
        for record in self.records:
            for entry in record:
                ids = [self.shards[entry["shard"]].trajectory_ids[row] for row in entry["rows"]]
                assert {uses[name] for name in ids} == {entry["uses"]}, "the record says which use it is"
                uses.update(ids)
                tokens[entry["uses"] == 0] += sum(entry["lengths"])
            assert len(record) == len({entry["group_id"] for entry in record})
        assert max(uses.values(), default=0) <= self.max_reuse
        assert self.buffer.ledger.tokens()["consumed"] == tokens[True]
        assert self.buffer.ledger.reused["tokens"] == tokens[False]

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
        again.consume_again(group_of_record(entry, lambda refs: fetch(shards, refs)))
    again.advance(1)
    assert again.ledger.tokens()["consumed"] == 21
    again.add(make_rows("s1", make_group("a", size=3, lengths=[12, 20, 9])))  # a duplicate arrives before the shard
    again.add(shards["s0"])
    assert again.ledger.tokens() == buffer.ledger.tokens() | {"read": 82, "duplicate": 41}
    assert again.ledger.tokens()["overlong"] == 20

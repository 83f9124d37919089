"""The replay buffer: whole groups between the shards and the batches.

A group is closed when its shard is read, because actors write whole groups. Its rows then go, each
exactly once, to a class of the ledger:

    duplicate     delivered before, or of a group delivered before; so all of a group that another
                  incarnation has delivered, whose block was reissued
    quarantined   a fault in the row, or its id is taken by other content
    stale         the group's oldest policy token is over the bound, now or when it would be consumed
    filtered      nothing to learn from: fewer than two episodes, no policy token, or (on request)
                  equal rewards. The actor closes a group, with the episodes it has by then, and its shard holds all
                  of them: so nothing is waited for here, and what is missing is counted
    overlong      longer than a window; its reward still counts in the group's baseline
    surplus       evicted for memory, oldest version first, or left at the end
    buffered      waiting, or in the batch that is prepared but not dispatched
    consumed      in a step

A group may be trained on `max_reuse` times, each time within the bound. From its first step on it is consumed; further
ones are counted beside the classes, as `reused`, and it can be dropped without changing a class.

Where several feeds fill one learner's batches, each has a buffer of its own, and a group may come to two of
them (a block of tasks that was reissued). So a group can be taken only after the feeds have told each other of
it (`announce`, `settle`); of two, one becomes a duplicate.

Methods are thread-safe. Advantages are computed once, when the group closes, over the episodes that
were delivered whole.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tunix_core.data.groups import Group, choose, oldest_version
from tunix_core.data.ledger import Ledger
from tunix_core.data.rows import Rows
from tunix_core.data.seen import SeenTrajectories, digest
from tunix_core.errors import DataError, ObjectMissing
from tunix_core.types import Order, RowRef

GroupAdvantages = Callable[[Rows, np.ndarray], np.ndarray]
"""(a shard's rows, positions [N] of the delivered ones of one group) -> advantages, as in `Group`; forks of an
episode count once."""
FetchRows = Callable[[Sequence[RowRef]], Rows]
"""References into one shard -> these rows. Raises DataError or StoreError when they cannot be read."""


MAX_ABS_REWARD = 1e9
"""Where an advantage is not divided by a deviation, a gradient is as large as the reward; its square must fit float32."""


class Taken(NamedTuple):
    """A batch, or why there is none."""

    groups: list[Group] | None
    num_fresh: int
    """Groups within the bound that were there to choose from."""
    mean_staleness: float
    """Of the batch, or of the best batch there is where that is over the limit."""


News = list[tuple[int, int]]
"""Digests of groups that were delivered, and of the incarnations that did."""


class ReplayBuffer:
    """See the module. `clock` is the number of completed steps."""

    def __init__(
        self,
        *,
        group_advantages: GroupAdvantages,
        window_tokens: int,
        max_staleness: int,
        buffer_bytes: int,
        order: Order = "oldest_first",
        max_reuse: int = 1,
        filter_zero_signal: bool = False,
        feed: int = 0,
        num_feeds: int = 1,
    ) -> None:
        self._group_advantages = group_advantages
        self._window_tokens = window_tokens
        self._max_staleness = max_staleness
        self._buffer_bytes = buffer_bytes
        self._order = order
        self._max_reuse = max_reuse
        self._filter_zero_signal = filter_zero_signal
        self._feed = feed
        self._num_feeds = num_feeds
        self.lock = threading.RLock()
        """Held by callers that need two calls to be one, such as adding shards and noting the cursors."""
        self.clock = 0
        self.ledger = Ledger()
        self.cursors: dict[str, Any] | None = None
        """State of the reader after the last shard that was added."""
        self.missing_episodes = 0
        """Of groups that closed with fewer episodes than they announced."""
        self._seen = SeenTrajectories()
        self._waiting: dict[str, Group] = {}
        self._reserved: dict[str, Group] = {}
        self._replayed: set[tuple[str, int]] = set()
        self._news: dict[int, str] = {}
        """Groups that the other feeds have not been told of: digest -> id."""
        self._announced: dict[int, str] = {}
        """… that they are being told of."""
        self._round = 0
        """How often they have been told."""
        self._bytes = 0
        self._arrivals = 0

    # ---- in -----------------------------------------------------------------------------------

    def add(self, rows: Rows) -> dict[int, str]:
        """Take one shard's rows in.

        Returns:
            Row number -> reason, of the rows to be recorded in quarantine.
        """
        members: dict[str, list[int]] = {}
        for i, group_id in enumerate(rows.group_ids):
            members.setdefault(group_id, []).append(i)
        refused: dict[int, str] = {}
        with self.lock:
            for group_id, positions in members.items():
                self._add_group(group_id, rows, np.array(positions), refused)
            self._evict()
            assert self.ledger.balanced, f"ledger out of balance after {rows.shard}"
        return refused

    def add_unreadable(self, shard: str, num_bytes: int) -> None:
        """A shard that could not be decoded; counted by bytes beside the ledger."""
        with self.lock:
            self.ledger.refuse_shard(shard, num_bytes)

    def _add_group(self, group_id: str, rows: Rows, members: np.ndarray, refused: dict[int, str]) -> None:
        lengths = rows.lengths
        refs = [(rows.shard, int(rows.index[i])) for i in members]
        # A step that was executed again after a restart may have consumed rows that the reader had
        # not reached when the checkpoint was taken. They are counted; what is left of their group
        # is sorted as it was the first time, but can no longer enter the buffer.
        replayed = np.array([ref in self._replayed for ref in refs])
        self._replayed.difference_update(refs)
        members = members[~replayed]
        delivered_before = self._seen.has_group(group_id)
        reissued = self._seen.is_reissued(group_id, rows.incarnation)
        good: list[int] = []
        for i in members.tolist():
            reason, name = self._judge_row(rows, i, reissued)
            if not reason and delivered_before and not (replayed.any() and lengths[i] > self._window_tokens):
                name = "duplicate"
            if name:
                self.ledger.receive(name, lengths[[i]])
                if reason:
                    refused[int(rows.index[i])] = reason
            else:
                self._seen.add(rows.trajectory_ids[i], rows.content_hashes[i])
                good.append(i)
        if good:
            if self._num_feeds > 1 and not delivered_before:
                self._news[digest(group_id)] = group_id
            self._seen.add_group(group_id, rows.incarnation)
            self._close_group(group_id, rows, np.array(good), replayed=bool(replayed.any()))

    def _judge_row(self, rows: Rows, i: int, reissued: bool) -> tuple[str, str]:
        """Reason of a refusal or '', and the ledger class that a single row goes to or ''."""
        row = int(rows.index[i])
        if row in rows.faults:
            return rows.faults[row], "quarantined"
        if rows.version_max[i] > self.clock:
            return f"policy_version_max {rows.version_max[i]} is ahead of the clock {self.clock}", "quarantined"
        if not (abs(rows.rewards[i]) <= MAX_ABS_REWARD and 0 < rows.temperature[i] < np.inf):
            return (
                f"reward {rows.rewards[i]}, temperature {rows.temperature[i]}: accepted rewards within "
                f"{MAX_ABS_REWARD:g} of 0 and positive, finite temperatures",
                "quarantined",
            )
        if reissued:
            return "", "duplicate"  # played again by another actor: other content under the same ids is no fault
        known = self._seen.check(rows.trajectory_ids[i], rows.content_hashes[i])
        if known == "other":
            return f"trajectory_id {rows.trajectory_ids[i]!r} was delivered before with other content", "quarantined"
        return "", "duplicate" if known == "same" else ""

    def _close_group(self, group_id: str, rows: Rows, good: np.ndarray, *, replayed: bool) -> None:
        lengths = rows.lengths[good]
        if replayed:
            self.ledger.receive("overlong", lengths)
            return
        episodes = [rows.episode_ids[i] for i in good]
        num_episodes = len(set(episodes))
        self.missing_episodes += max(0, int(rows.group_sizes[good[0]]) - num_episodes)
        oldest = oldest_version(rows.version_min[good])
        rewards = rows.rewards[good]
        if oldest >= 0 and self.clock - oldest > self._max_staleness:
            self.ledger.receive("stale", lengths)
            return
        no_signal = self._filter_zero_signal and bool((rewards == rewards[0]).all())
        if num_episodes < 2 or oldest < 0 or no_signal:
            self.ledger.receive("filtered", lengths)
            return
        advantages = np.asarray(self._group_advantages(rows, good), np.float32)
        fits = lengths <= self._window_tokens
        self.ledger.receive("overlong", lengths[~fits])
        if fits.any() and oldest_version(rows.version_min[good[fits]]) >= 0:
            self.ledger.receive("buffered", lengths[fits])
            self._hold(group_id, rows.take(good[fits]), advantages[fits])
        else:
            self.ledger.receive("filtered", lengths[fits])

    def _hold(self, group_id: str, rows: Rows, advantages: np.ndarray, uses: int = 0) -> None:
        group = Group(
            group_id=group_id,
            rows=rows,
            advantages=advantages,
            arrival=self._arrivals,
            num_bytes=rows.num_bytes,
            uses=uses,
            round=self._round,
        )
        self._arrivals += 1
        self._waiting[group_id] = group
        self._bytes += group.num_bytes

    def _evict(self) -> None:
        while self._bytes > self._buffer_bytes and self._waiting:
            oldest = min(self._waiting.values(), key=lambda g: (-g.uses, g.version_min, g.arrival))
            self._drop(oldest, "surplus")

    def _drop(self, group: Group, name: str) -> None:
        del self._waiting[group.group_id]
        self._bytes -= group.num_bytes
        if group.uses == 0:
            self.ledger.move("buffered", name, group.rows.lengths)

    # ---- between feeds ------------------------------------------------------------------------

    def announce(self) -> News:
        """What the other feeds are to be told; to be followed by `settle`."""
        with self.lock:
            self._announced, self._news = self._news, {}
            self._round += 1
            return self._seen.groups(self._announced)

    def settle(self, told: Sequence[News]) -> None:
        """What each feed has announced in this round, in their order.

        Of a group that two have delivered the one that was announced first stays, or the lower feed's.
        """
        with self.lock:
            won: set[int] = set()
            for feed, news in enumerate(told):
                for group, incarnation in news if feed != self._feed else ():
                    if group in won or (group in self._announced and self._feed < feed):
                        continue
                    won.add(group)
                    lost = self._news.pop(group, None) or self._announced.pop(group, None)
                    if lost is not None and lost in self._waiting:
                        self._drop(self._waiting[lost], "duplicate")
                    self._seen.add_common(group, incarnation)
            self._announced = {}

    def note_delivered(self, group_id: str, incarnation: str) -> None:
        """Another feed's group went into a step that is executed again.

        A copy may wait here: feeds are saved at one clock, but not in one moment of a round.
        """
        with self.lock:
            if (held := self._waiting.get(group_id)) is not None:
                self._drop(held, "duplicate")
            self._seen.add_common(digest(group_id), digest(incarnation))

    def _settled(self) -> list[Group]:
        """The waiting groups that may be taken."""
        if self._num_feeds == 1:
            return list(self._waiting.values())
        pending = {*self._news.values(), *self._announced.values()}
        return [group for group in self._waiting.values() if group.group_id not in pending]

    # ---- out ----------------------------------------------------------------------------------

    def take(self, num_groups: int, clock: int, *, max_mean_staleness: float) -> Taken:
        """Reserve the batch of the step that will consume at `clock`, dropping what is over the bound there.

        Reserved groups still count as buffered, and cannot be evicted.
        """
        with self.lock:
            self._expire(clock)
            settled = self._settled()
            groups, mean = choose(
                settled,
                num_groups,
                clock,
                order=self._order,
                max_mean_staleness=max_mean_staleness,
            )
            for group in groups or ():
                self._reserved[group.group_id] = self._waiting.pop(group.group_id)
            return Taken(groups, len(settled), mean)

    def put_back(self, groups: Sequence[Group]) -> None:
        """Undo the reservation."""
        with self.lock:
            for group in groups:
                self._waiting[group.group_id] = self._reserved.pop(group.group_id)

    def consume(self, groups: Sequence[Group], clock: int) -> None:
        """Reserved groups go into the step that consumes at `clock`."""
        with self.lock:
            for group in groups:
                assert clock - group.version_min <= self._max_staleness, f"group {group.group_id} is over the bound"
                del self._reserved[group.group_id]
                self._bytes -= group.num_bytes
                self._use(group)

    def _use(self, group: Group) -> None:
        """A group that is in no collection any more was trained on; it may come back for another time."""
        if group.uses:
            self.ledger.reuse(group.rows.lengths)
        else:
            self.ledger.move("buffered", "consumed", group.rows.lengths)
        if group.uses + 1 < self._max_reuse:
            self._waiting[group.group_id] = dataclasses.replace(group, uses=group.uses + 1)
            self._bytes += group.num_bytes

    def consume_again(self, group: Group) -> None:
        """A step record is executed again: its rows are consumed, whether the reader passed them yet or not.

        The copy that waits may be another's, as in `note_delivered`.

        Args:
            group: of the record, which says how often it had been used before.
        """
        rows, group_id = group.rows, group.group_id
        with self.lock:
            held = self._waiting.get(group_id)
            if held is not None and held.rows.refs() == rows.refs():
                assert held.uses == group.uses, f"group {group_id}: used {held.uses} times, recorded {group.uses}"
                del self._waiting[group_id]
                self._bytes -= held.num_bytes
                self._use(held)
                return
            if held is not None:
                self._drop(held, "duplicate")
            if group.uses == 0:
                self._note_early(group)
            self._use(dataclasses.replace(group, arrival=self._arrivals, round=self._round))
            self._arrivals += 1

    def _note_early(self, group: Group) -> None:
        """The reader has not passed it yet: it waits in no collection, and its delivery will count nothing."""
        rows = group.rows
        self.ledger.receive("buffered", rows.lengths)
        for trajectory_id, content_hash in zip(rows.trajectory_ids, rows.content_hashes, strict=True):
            self._seen.add(trajectory_id, content_hash)
        self._seen.add_group(group.group_id, rows.incarnation)
        self._replayed.update((rows.shard, int(row)) for row in rows.index)

    def advance(self, clock: int) -> None:
        """The clock after a step."""
        with self.lock:
            assert clock >= self.clock, "the clock never goes back"
            self.clock = clock

    def _expire(self, clock: int) -> None:
        for group in [g for g in self._waiting.values() if clock - g.version_min > self._max_staleness]:
            self._drop(group, "stale")

    def finish(self) -> None:
        """The run is over: what waits becomes surplus."""
        with self.lock:
            self.put_back(list(self._reserved.values()))
            for group in list(self._waiting.values()):
                self._drop(group, "surplus")

    def num_fresh(self, clock: int) -> int:
        """Waiting groups that a step at `clock` could consume."""
        with self.lock:
            return sum(clock - g.version_min <= self._max_staleness for g in self._waiting.values())

    def num_reserved(self) -> int:
        with self.lock:
            return len(self._reserved)

    # ---- state --------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """JSON values and arrays; rows are named, not copied, because shards are immutable."""
        with self.lock:
            groups = sorted([*self._waiting.values(), *self._reserved.values()], key=lambda g: g.arrival)
            values = {
                "clock": self.clock,
                "cursors": self.cursors,
                "ledger": self.ledger.state(),
                "missing_episodes": self.missing_episodes,
                "groups": [group_state(g) | {"round": g.round} for g in groups],
                "replayed": sorted([shard, row] for shard, row in self._replayed),
            }
            return values, self._seen.arrays(self._feed, self._num_feeds)

    def restore(
        self, values: Mapping[str, Any], arrays: Mapping[str, np.ndarray], fetch: FetchRows
    ) -> dict[RowRef, str]:
        """Continue from `state()`; with several feeds from what `sharing.dealt` makes of theirs, and from all of
        their arrays, joined. A group whose rows can no longer be read goes to quarantine.

        Returns:
            The refused rows and why.
        """
        refused: dict[RowRef, str] = {}
        with self.lock:
            self.clock = values["clock"]
            self.cursors = values["cursors"]
            self.ledger = Ledger.restore(values["ledger"])
            self.missing_episodes = values["missing_episodes"]
            self._seen = SeenTrajectories.restore(arrays)
            self._replayed = {(shard, row) for shard, row in values["replayed"]}
            self._waiting, self._reserved, self._bytes, self._arrivals = {}, {}, 0, 0
            self._news, self._announced, self._round = {}, {}, 0
            for entry in values["groups"]:
                lengths = np.array(entry["lengths"], np.int64)
                refs = [RowRef(shard=entry["shard"], row=row) for row in entry["rows"]]
                rows, reason = _fetch(fetch, refs, lengths)
                if rows is None:
                    if entry.get("uses", 0) == 0:
                        self.ledger.move("buffered", "quarantined", lengths)
                    refused.update(dict.fromkeys(refs, reason))
                else:
                    self._hold(entry["group_id"], rows, np.array(entry["advantages"], np.float32), entry.get("uses", 0))
        return refused


def group_state(group: Group) -> dict[str, Any]:
    """References and advantages of a group: its form in checkpoints and step records."""
    return {
        "group_id": group.group_id,
        "shard": group.rows.shard,
        "rows": group.rows.index.tolist(),
        "lengths": group.rows.lengths.tolist(),
        "uses": group.uses,
        "advantages": group.advantages.astype(np.float64).tolist(),
    }


def _fetch(fetch: FetchRows, refs: Sequence[RowRef], lengths: np.ndarray) -> tuple[Rows | None, str]:
    try:
        rows = fetch(refs)
    except (DataError, ObjectMissing) as error:
        return None, str(error)
    if not np.array_equal(rows.lengths, lengths):
        return None, f"lengths {rows.lengths.tolist()} where the checkpoint has {lengths.tolist()}"
    return rows, ""

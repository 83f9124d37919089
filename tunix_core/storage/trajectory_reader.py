"""Reads every shard of every writer exactly once, by name, from a cursor that is a JSON value.

One cursor per incarnation: its next sequence number and its hour. A poll lists, per live writer, only
the names after the cursor in the cursor's hour; the announcement is read again only when the hour
may have changed. Closed writers cost nothing. So a poll's cost grows with new shards and live
writers, never with history.

A missing number below a seen one cannot happen while writers and store keep their promises. It is an
alarm, and that writer waits there: skipping it would lose data silently.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from tunix_core import paths
from tunix_core.errors import ConfigError, CorruptObject, ObjectMissing
from tunix_core.storage.shards import ShardRows, decode
from tunix_core.storage.store import ObjectStore, map_requests
from tunix_core.storage.writers import WriterRecord, incarnation_milliseconds, read_writer

_STATE_FORMAT = 1
_CLOCK_SKEW_SECONDS = 120.0
_IDLE_POLLS_PER_CHECK = 16
"""How often an idle writer's announcement is read although no new hour is due (clocks jump)."""
_ONE_LISTING = 1000
"""Writers that one listing request returns; beyond them only recent ids are looked at …"""
_POLLS_PER_FULL_LISTING = 64
"""… except once in so many polls."""
_DISCOVERY_OVERLAP_MILLISECONDS = 3_600_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardRead:
    """One shard, read. Either `rows` or `fault` is set."""

    key: str
    num_bytes: int
    incarnation: str
    sequence: int
    rows: ShardRows | None = None
    fault: str | None = None


@dataclasses.dataclass(kw_only=True)
class _Cursor:
    actor_id: str
    created_at: float
    next_sequence: int = 0
    """Every number below it has been read, or is another reader's."""
    hour: str = ""
    closed: bool = False
    ahead: list[int] = dataclasses.field(default_factory=list)
    """Numbers from there on that have been read all the same: several readers' cursors were made one."""


class TrajectoryReader:
    """`poll` returns what is new; `state` is what a checkpoint keeps of it."""

    def __init__(
        self,
        store: ObjectStore,
        state: Mapping[str, Any] | None = None,
        *,
        vocab_size: int | None = None,
        owns: Callable[[str, int], bool] = lambda *_: True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            state: an earlier reader's `state()`; None starts at the beginning.
            vocab_size: tokens outside it make a row faulty.
            owns: (incarnation, sequence number) -> whether this reader reads the shard, or passes over it.
            clock: seconds since the epoch; only decides when an idle writer may have a new hour.

        Raises:
            ConfigError: a state of another format.
        """
        if state is not None and state.get("format") != _STATE_FORMAT:
            raise ConfigError("reader state", state.get("format"), f"format {_STATE_FORMAT}", "Use this release's.")
        self._store = store
        self._vocab_size = vocab_size
        self._owns = owns
        self._clock = clock
        self._cursors = {name: _Cursor(**value) for name, value in (state["cursors"] if state else {}).items()}
        self._idle_polls: collections.Counter[str] = collections.Counter()
        self._num_polls = 0
        self._turn = 0
        self._alarms: dict[str, str] = {}

    def state(self) -> dict[str, Any]:
        """JSON: a cursor per incarnation. A reader made from it continues behind what `poll` returned."""
        cursors = {name: dataclasses.asdict(cursor) for name, cursor in sorted(self._cursors.items())}
        for cursor in cursors.values():
            if not cursor["ahead"]:
                del cursor["ahead"]
        return {"format": _STATE_FORMAT, "cursors": cursors}

    def next_sequences(self) -> dict[str, int]:
        """Incarnation -> how many of its shards have been read, for those not ended."""
        return {name: self._cursors[name].next_sequence for name in self.live_incarnations()}

    def live_incarnations(self) -> list[str]:
        """Announced and neither closed nor fenced, in rank order: oldest first."""
        live = [(cursor.created_at, name) for name, cursor in self._cursors.items() if not cursor.closed]
        return [name for _, name in sorted(live)]

    def actor_of(self, incarnation: str) -> str:
        """The actor id of a known incarnation."""
        return self._cursors[incarnation].actor_id

    @property
    def alarms(self) -> list[str]:
        """Holes that stand: a person must look. The writers concerned are not read past them."""
        return [self._alarms[name] for name in sorted(self._alarms)]

    def poll(self, max_shards: int = 64) -> list[ShardRead]:
        """Read up to `max_shards` new shards, a fair share of every writer's, each writer's in order.

        Raises:
            StoreError: nothing of this poll counts; poll again.
        """
        cursors = copy.deepcopy(self._cursors)
        alarms = dict(self._alarms)
        self._discover(cursors, alarms)
        live = sorted(name for name, cursor in cursors.items() if not cursor.closed)
        found = map_requests(self._store, lambda name: self._find_or_wait(name, cursors[name]), live)
        queues: list[collections.deque[paths.ShardName]] = []
        passed = {name: names[-1].sequence + 1 for name, (names, _) in zip(live, found, strict=True) if names}
        for name, (names, alarm) in zip(live, found, strict=True):
            if names or cursors[name].closed:
                alarms.pop(name, None)
            if alarm:  # stands until the missing shard turns up: most polls look too briefly to see it again
                alarms[name] = alarm
            self._idle_polls[name] = 0 if names else self._idle_polls[name] + 1
            queues.append(collections.deque(n for n in names if self._is_due(cursors[name], n)))
        chosen = _round_robin(queues, max_shards, self._turn)
        for queue in queues:
            if queue:  # what is left over is where the next poll goes on
                passed[queue[0].incarnation] = queue[0].sequence
        reads = map_requests(self._store, self._read, chosen)
        kept = _advance(cursors, alarms, chosen, reads, passed)
        self._cursors, self._alarms = cursors, alarms  # only now: a poll that raised has not happened
        self._num_polls += 1
        self._turn += 1
        return kept

    def _is_due(self, cursor: _Cursor, name: paths.ShardName) -> bool:
        return name.sequence not in cursor.ahead and self._owns(name.incarnation, name.sequence)

    # --- finding ---

    def _discover(self, cursors: dict[str, _Cursor], alarms: dict[str, str]) -> None:
        after = ""
        if len(cursors) >= _ONE_LISTING and self._num_polls % _POLLS_PER_FULL_LISTING:
            latest = incarnation_milliseconds(max(cursors))
            if latest is not None:
                after = paths.writer(f"{max(0, latest - _DISCOVERY_OVERLAP_MILLISECONDS):011x}")
        listed = self._store.list_after(paths.WRITERS, after)
        names = [key.removeprefix(paths.WRITERS).removesuffix(".json") for key in listed if key.endswith(".json")]
        new = [name for name in names if name not in cursors]
        for name, record in zip(new, map_requests(self._store, self._announced, new), strict=True):
            if isinstance(record, WriterRecord):
                cursors[name] = _Cursor(actor_id=record.actor_id, created_at=record.created_at)
                alarms.pop(name, None)
            else:
                alarms[name] = record

    def _announced(self, name: str) -> WriterRecord | str:
        """A new writer's announcement, or what is wrong with it: such a writer costs the others nothing."""
        try:
            return read_writer(self._store, name)
        except CorruptObject as error:
            return f"{paths.writer(name)}: {error}"

    def _find_or_wait(self, name: str, cursor: _Cursor) -> tuple[list[paths.ShardName], str | None]:
        """As `_find`; of a writer whose announcement is broken nothing is found until it is sound."""
        try:
            return self._find(name, cursor)
        except CorruptObject as error:
            return [], f"{paths.writer(name)}: {error}"

    def _find(self, name: str, cursor: _Cursor) -> tuple[list[paths.ShardName], str | None]:
        """The contiguous new names of one writer, and an alarm where a number is missing.

        Moves the cursor to another hour, or closes it, where nothing is left in between.
        """
        record: WriterRecord | None = None
        if not cursor.hour:
            record = read_writer(self._store, name)
        while True:
            if record is not None and self._follow(cursor, record):
                return [], None
            if not cursor.hour:
                return [], None  # announced, nothing written yet
            names = self._list(name, cursor)
            if names:
                run = [found for i, found in enumerate(names) if found.sequence == cursor.next_sequence + i]
                return run, None if run else self._hole(cursor, names[0].key)
            if record is not None:
                # the announcement was read before the listing, so what it speaks of must have been listed
                return [], self._missing(cursor, record)
            if not self._hour_may_have_changed(name, cursor):
                return [], None
            record = read_writer(self._store, name)

    def _follow(self, cursor: _Cursor, record: WriterRecord) -> bool:
        """Go on to the announced hour in which the next number lies; True when the writer has ended there."""
        for partition, first in record.hours:
            if first <= cursor.next_sequence and partition > cursor.hour:
                cursor.hour = partition
        # Past it: the tombstone that ended the writer was another reader's to read.
        if record.closed and record.next_sequence is not None and record.next_sequence <= cursor.next_sequence:
            cursor.closed = True
        return cursor.closed

    def _list(self, name: str, cursor: _Cursor) -> list[paths.ShardName]:
        prefix = f"{paths.TRAJECTORIES}{cursor.hour}/{cursor.actor_id}-{name}-"
        after = ""
        if cursor.next_sequence:
            after = paths.ShardName(cursor.hour, cursor.actor_id, name, cursor.next_sequence - 1).key
        return [paths.parse_shard(key) for key in self._store.list_after(prefix, after) if _is_shard_of(prefix, key)]

    def _hour_may_have_changed(self, name: str, cursor: _Cursor) -> bool:
        now = self._clock()
        around = {paths.hour_partition(now - _CLOCK_SKEW_SECONDS), paths.hour_partition(now + _CLOCK_SKEW_SECONDS)}
        return around != {cursor.hour} or self._idle_polls[name] % _IDLE_POLLS_PER_CHECK == 0

    @staticmethod
    def _hole(cursor: _Cursor, seen: str) -> str:
        return f"{cursor.actor_id}: shard {cursor.next_sequence} is missing although {seen} exists"

    @staticmethod
    def _missing(cursor: _Cursor, record: WriterRecord) -> str | None:
        later = [first for partition, first in record.hours if partition > cursor.hour]
        promised = max([*later[-1:], record.next_sequence or 0, 0])
        if promised > cursor.next_sequence:
            return (
                f"{cursor.actor_id}: shard {cursor.next_sequence} is missing although "
                f"{record.incarnation} announced {promised}"
            )
        return None

    # --- reading ---

    def _read(self, name: paths.ShardName) -> ShardRead | None:
        try:
            data = self._store.get(name.key)
        except ObjectMissing:
            return None
        rows, fault = None, None
        try:
            rows = decode(data, vocab_size=self._vocab_size)
        except CorruptObject as error:
            fault = str(error)
        return ShardRead(
            key=name.key,
            num_bytes=len(data),
            incarnation=name.incarnation,
            sequence=name.sequence,
            rows=rows,
            fault=fault,
        )


def _is_shard_of(prefix: str, key: str) -> bool:
    """Whether a listed key is a shard's. Anything else may lie beside them; it is no writer's, and passed over."""
    return re.fullmatch(r"[0-9]{8}\.parquet", key.removeprefix(prefix)) is not None


def _round_robin(queues: list[collections.deque[paths.ShardName]], limit: int, turn: int) -> list[paths.ShardName]:
    """Up to `limit` names, one of each queue at a time; who comes first changes by turn."""
    chosen: list[paths.ShardName] = []
    shift = turn % len(queues) if queues else 0
    waiting = collections.deque(queue for queue in queues[shift:] + queues[:shift] if queue)
    while waiting and len(chosen) < limit:
        queue = waiting.popleft()
        chosen.append(queue.popleft())
        if queue:
            waiting.append(queue)
    return chosen


def _advance(
    cursors: dict[str, _Cursor],
    alarms: dict[str, str],
    chosen: list[paths.ShardName],
    reads: list[ShardRead | None],
    passed: Mapping[str, int],
) -> list[ShardRead]:
    """Move cursors over what was read; returns the shards, tombstones taken out.

    Args:
        passed: incarnation -> where its cursor goes once all that was chosen of it is read.
    """
    kept: list[ShardRead] = []
    stopped: set[str] = set()
    for name, read in zip(chosen, reads, strict=True):
        if name.incarnation in stopped:
            continue
        cursor = cursors[name.incarnation]
        if read is None:  # listed a moment ago: somebody deletes shards
            alarms[name.incarnation] = f"{cursor.actor_id}: {name.key} vanished before it was read"
            stopped.add(name.incarnation)
        elif read.rows is not None and read.rows.metadata.get("tombstone") == "true":
            cursor.closed = True
            stopped.add(name.incarnation)
        else:
            cursor.next_sequence = name.sequence + 1
            kept.append(read)
    for incarnation, sequence in passed.items():
        cursor = cursors[incarnation]
        if incarnation not in stopped:
            cursor.next_sequence = sequence
        cursor.ahead = [number for number in cursor.ahead if number >= cursor.next_sequence]
    return kept

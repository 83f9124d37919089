"""Announcements of actor incarnations, `writers/<incarnation>.json`, and how one is ended for good.

The announcement names the hours an incarnation writes into, each with its first sequence number,
before the first shard of that hour, so that a reader finds every shard by name. A writer that ended,
or was declared dead, has a tombstone at its next sequence number: created like a shard, so a
writer that only seemed dead loses that race and learns that it is fenced.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any

from tunix_core import paths
from tunix_core.errors import ConfigError, CorruptObject, Fenced, ObjectExists, ObjectMissing
from tunix_core.storage.shards import encode, is_tombstone
from tunix_core.storage.store import ObjectStore, map_requests, read_json, update_json

_TIME_DIGITS = 11
_ACTOR_ID = re.compile(r"(?!\.)[a-z0-9_.]{1,100}")
_INCARNATION = re.compile(r"[a-z0-9]{1,64}")
_PARTITION = re.compile(r"date=[0-9]{4}-[0-9]{2}-[0-9]{2}/hour=[0-9]{2}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriterRecord:
    """One incarnation's announcement."""

    incarnation: str
    actor_id: str
    created_at: float
    hours: tuple[tuple[str, int], ...] = ()
    """`(partition, first sequence number)` in order."""
    closed: bool = False
    """Nothing follows: `next_sequence` is final."""
    fenced: bool = False
    """Declared dead by someone else; set before its tombstone, so that no new hour can be announced."""
    next_sequence: int | None = None
    """How many shards there are, once closed."""

    def shard_key(self, sequence: int) -> str:
        """Key of a shard in the hour announced last."""
        return paths.ShardName(self.hours[-1][0], self.actor_id, self.incarnation, sequence).key

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "hours": [list(hour) for hour in self.hours]}


def check_names(actor_id: str, incarnation: str) -> None:
    """What becomes part of the keys of shards.

    Raises:
        ConfigError: an id that does not fit.
    """
    if not _ACTOR_ID.fullmatch(actor_id):
        raise ConfigError("actor_id", actor_id, "1 to 100 of a-z 0-9 _ .", "Join its parts with '_'.")
    if not _INCARNATION.fullmatch(incarnation):
        raise ConfigError("incarnation", incarnation, "1 to 64 of a-z 0-9", "Use writers.new_incarnation().")


def writer_from_dict(value: Mapping[str, Any]) -> WriterRecord:
    """Raises CorruptObject when fields are missing, of the wrong kind, or would make keys that no writer has."""
    try:
        record = WriterRecord(
            incarnation=str(value["incarnation"]),
            actor_id=str(value["actor_id"]),
            created_at=float(value["created_at"]),
            hours=tuple((str(partition), int(first)) for partition, first in value["hours"]),
            closed=bool(value["closed"]),
            fenced=bool(value["fenced"]),
            next_sequence=None if value["next_sequence"] is None else int(value["next_sequence"]),
        )
        check_names(record.actor_id, record.incarnation)
        if not math.isfinite(record.created_at) or not all(
            _PARTITION.fullmatch(partition) and first >= 0 for partition, first in record.hours
        ):
            raise ValueError("a time or an hour that is none")
        return record
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CorruptObject(f"writer announcement: {error!r} in {dict(value)!r}"[:500]) from error


def new_incarnation(now: float | None = None) -> str:
    """An id for one life of a process: sorts by time (milliseconds, hex), then random.

    Readers of more than a thousand writers look for new ones among the recent ids only, so ids made
    otherwise are found later there.
    """
    milliseconds = int((time.time() if now is None else now) * 1000)
    return f"{milliseconds:0{_TIME_DIGITS}x}{uuid.uuid4().hex[:8]}"


def incarnation_milliseconds(incarnation: str) -> int | None:
    """The time inside an id of `new_incarnation`; None for another kind of id."""
    if re.fullmatch(rf"[0-9a-f]{{{_TIME_DIGITS + 8}}}", incarnation):
        return int(incarnation[:_TIME_DIGITS], 16)
    return None


def read_writer(store: ObjectStore, incarnation: str) -> WriterRecord:
    """Raises ObjectMissing or CorruptObject."""
    record = writer_from_dict(read_json(store, paths.writer(incarnation)))
    if record.incarnation != incarnation:
        raise CorruptObject(f"writer announcement of {incarnation!r}: received that of {record.incarnation!r}"[:500])
    return record


def read_writers(store: ObjectStore) -> list[WriterRecord]:
    """All announcements, oldest first. Costs a request per writer that ever was."""
    keys = store.list_after(paths.WRITERS)
    records = map_requests(store, lambda key: writer_from_dict(read_json(store, key)), keys)
    return sorted(records, key=lambda record: (record.created_at, record.incarnation))


def update_writer(store: ObjectStore, incarnation: str, **changes: Any) -> WriterRecord:
    """Change an announcement whoever else does.

    Raises:
        ObjectMissing: there is none.
    """

    def apply(current: dict[str, Any] | None) -> dict[str, Any] | None:
        if current is None:
            raise ObjectMissing(f"{store.uri}: no writer {incarnation}")
        changed = {**current, **changes}
        return None if changed == current else changed

    value = update_json(store, paths.writer(incarnation), apply)
    assert value is not None
    return writer_from_dict(value)


def announce_hour(store: ObjectStore, record: WriterRecord, partition: str, sequence: int) -> WriterRecord:
    """Add an hour to the writer's own announcement.

    Raises:
        Fenced: the incarnation has been declared dead or closed.
    """

    def add(current: dict[str, Any] | None) -> dict[str, Any] | None:
        if current is None or current["fenced"] or current["closed"]:
            raise Fenced(f"writer {record.incarnation}: its announcement was closed by another process")
        if current["hours"] and current["hours"][-1][0] >= partition:
            return None
        return {**current, "hours": [*current["hours"], [partition, sequence]]}

    value = update_json(store, paths.writer(record.incarnation), add)
    assert value is not None
    return writer_from_dict(value)


def put_tombstone(store: ObjectStore, record: WriterRecord, sequence: int) -> int:
    """End the writer at the first free sequence number from `sequence` on; returns that number.

    One that ended before keeps its number.
    """
    if not record.hours:
        return 0
    body = encode([], metadata={"tombstone": "true", "incarnation": record.incarnation, "actor_id": record.actor_id})
    while True:
        key = record.shard_key(sequence)
        try:
            store.put_if_absent(key, body)
            return sequence
        except ObjectExists:
            if is_tombstone(store.get(key)):
                return sequence
            sequence += 1  # a shard that landed meanwhile: it counts


def fence_incarnation(store: ObjectStore, incarnation: WriterRecord | str) -> WriterRecord:
    """Declare a writer dead: after this no shard of it can appear. Safe to repeat, also after a crash.

    Deciding that it is dead (no heartbeat) is the caller's task; being wrong costs that actor its life,
    not data: what it had committed stays, and the readers read it.
    """
    name = incarnation.incarnation if isinstance(incarnation, WriterRecord) else incarnation
    record = read_writer(store, name)
    if record.closed:
        return record
    record = update_writer(store, name, fenced=True)
    sequence = 0
    if record.hours:
        partition, sequence = record.hours[-1]
        prefix = f"{paths.TRAJECTORIES}{partition}/{record.actor_id}-{record.incarnation}-"
        names = [paths.parse_shard(key) for key in store.list_after(prefix)]
        sequence = names[-1].sequence if names else sequence  # taken, by a shard or an earlier tombstone
    final = put_tombstone(store, record, sequence)
    return update_writer(store, name, closed=True, next_sequence=final)

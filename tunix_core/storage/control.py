"""Small control objects: stop request, the learner's pacing signal, heartbeats, process records."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from tunix_core import paths
from tunix_core.errors import ConfigError, CorruptObject, ObjectExists, ObjectMissing
from tunix_core.storage.store import (
    ObjectStore,
    Version,
    finite_or_none,
    from_json,
    map_requests,
    read_json,
    read_json_or_none,
    to_json,
    update_json,
    write_json,
    write_json_if_absent,
)

_Record = TypeVar("_Record")


def _from_dict(cls: type[_Record], key: str, value: Mapping[str, Any]) -> _Record:
    """Unknown fields are dropped (a newer writer may add some), missing ones without a default are corrupt."""
    known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]  # only dataclasses are passed
    try:
        return cls(**{name: item for name, item in value.items() if name in known})
    except TypeError as error:
        raise CorruptObject(f"{key}: {error}") from error


# --- stop -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopRequest:
    """Why the run ends: the first one stands."""

    reason: str
    source: str
    """The process that asked."""
    failed: bool
    requested_at: float


def request_stop(store: ObjectStore, *, reason: str, source: str, failed: bool) -> StopRequest:
    """Ask every process of the run to end; returns the request that stands, perhaps an earlier one."""
    request = StopRequest(reason=reason, source=source, failed=failed, requested_at=time.time())
    try:
        write_json_if_absent(store, paths.STOP, dataclasses.asdict(request))
        return request
    except ObjectExists:
        standing = read_stop(store)
        # A person who clears a failed run's tasks withdraws its stop, perhaps right now.
        return standing or request_stop(store, reason=reason, source=source, failed=failed)


def read_stop(store: ObjectStore) -> StopRequest | None:
    """None while no one has asked."""
    value = read_json_or_none(store, paths.STOP)
    return None if value is None else _from_dict(StopRequest, paths.STOP, value)


# --- the learner's signal ---------------------------------------------------------------------

LearnerState = Literal["stepping", "waiting", "throttled", "finished"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerSignal:
    """What actors pace themselves by; rewritten on a timer, also while the learner waits."""

    clock: int
    published_version: int
    step_seconds: float
    cursors: Mapping[str, int]
    """Incarnation -> next sequence number: how many of its shards have been read."""
    live_incarnations: list[str]
    """In rank order."""
    capacity_groups: int
    """Groups that the whole pool may have in flight."""
    target: int
    """Headroom in steps, adapted by the learner."""
    state: LearnerState
    learner_incarnation: str
    updated_at: float


def write_learner_signal(store: ObjectStore, signal: LearnerSignal) -> None:
    """Replace it; only the learner writes it."""
    write_json(store, paths.LEARNER_SIGNAL, dataclasses.asdict(signal))


def read_learner_signal(store: ObjectStore) -> LearnerSignal | None:
    """None before the learner's first."""
    value = read_json_or_none(store, paths.LEARNER_SIGNAL)
    return None if value is None else _from_dict(LearnerSignal, paths.LEARNER_SIGNAL, value)


# --- traces on demand -------------------------------------------------------------------------

MAX_PROFILE_STEPS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """The learner is to trace its next `steps` steps; once for each id."""

    id: str
    steps: int
    requested_at: float

    def __post_init__(self) -> None:
        paths.name("id", self.id)
        if type(self.steps) is not int or not 1 <= self.steps <= MAX_PROFILE_STEPS:
            raise ConfigError(
                "steps",
                self.steps,
                f"1 to {MAX_PROFILE_STEPS}",
                "A trace grows by megabytes a step: ask for a few, more than once.",
            )


def request_profile(store: ObjectStore, *, id: str, steps: int) -> ProfileRequest:
    """Ask for a trace; returns the request that stands.

    The newest request stands: one that the learner has not seen yet gives way. The same id again changes nothing.

    Raises:
        ConfigError: `id` is no name, or `steps` out of bounds.
    """
    request = ProfileRequest(id=id, steps=steps, requested_at=time.time())

    def apply(current: dict[str, Any] | None) -> dict[str, Any] | None:
        return None if current is not None and current.get("id") == id else dataclasses.asdict(request)

    value = update_json(store, paths.PROFILE_REQUEST, apply)
    assert value is not None
    return _from_dict(ProfileRequest, paths.PROFILE_REQUEST, value)


def read_profile_request(store: ObjectStore) -> ProfileRequest | None:
    """None while no one has asked. Raises CorruptObject or ConfigError for one that cannot be met."""
    value = read_json_or_none(store, paths.PROFILE_REQUEST)
    return None if value is None else _from_dict(ProfileRequest, paths.PROFILE_REQUEST, value)


def claim_profile(store: ObjectStore, request: ProfileRequest, *, incarnation: str) -> bool:
    """Take a request over; False where a learner, perhaps an earlier life of this one, has done so."""
    claim = {"incarnation": incarnation, "steps": request.steps, "claimed_at": time.time()}
    try:
        write_json_if_absent(store, paths.profile_claim(request.id), claim)
    except ObjectExists:
        return False
    return True


# --- heartbeats -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A sign of life with the figures a person wants to see."""

    process: str
    updated_at: float
    progress: Mapping[str, Any]


def write_heartbeat(
    store: ObjectStore, process: str, progress: Mapping[str, Any], *, clock: Callable[[], float] = time.time
) -> None:
    """Replace the process's heartbeat. Non-finite figures become null: a sign of life must not fail."""
    beat = {"process": process, "updated_at": clock(), "progress": finite_or_none(progress)}
    write_json(store, paths.heartbeat(paths.name("process", process)), beat)


def read_heartbeat(store: ObjectStore, process: str) -> Heartbeat | None:
    """None before its first."""
    key = paths.heartbeat(paths.name("process", process))
    value = read_json_or_none(store, key)
    return None if value is None else _from_dict(Heartbeat, key, value)


def read_heartbeats(store: ObjectStore) -> dict[str, Heartbeat]:
    """Process -> its last heartbeat."""
    keys = store.list_after(paths.HEARTBEATS)
    beats = map_requests(store, lambda key: _from_dict(Heartbeat, key, read_json(store, key)), keys)
    return {beat.process: beat for beat in beats}


# --- process records --------------------------------------------------------------------------

ProcessState = Literal["starting", "running", "exited"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessRecord:
    """One launched process; a pid counts only together with its host, boot and start time."""

    process: str
    submission_key: str
    """Names the submission; submitting the same again re-attaches."""
    attempt: int
    host: str
    boot_id: str
    pid: int | None
    pid_start: float | None
    state: ProcessState
    exit_code: int | None = None
    reason: str = ""
    updated_at: float = 0.0


def create_process(store: ObjectStore, record: ProcessRecord) -> Version:
    """First record of a process. Raises ObjectExists when there is one."""
    return store.put_if_absent(_process_key(record.process), to_json(_stamped(record)))


def read_process(store: ObjectStore, process: str) -> tuple[ProcessRecord, Version] | None:
    """The record and its version, for `replace_process`; None before its first."""
    key = _process_key(process)
    try:
        data, version = store.get_with_version(key)
    except ObjectMissing:
        return None
    return _from_dict(ProcessRecord, key, from_json(key, data)), version


def replace_process(store: ObjectStore, record: ProcessRecord, version: Version) -> Version:
    """Compare-and-swap. Raises VersionConflict when someone else changed it since."""
    return store.put_if_version(_process_key(record.process), to_json(_stamped(record)), version)


def update_process(
    store: ObjectStore, process: str, fn: Callable[[ProcessRecord | None], ProcessRecord | None]
) -> ProcessRecord | None:
    """Read, change, write back until no one was faster; `fn` returns None to leave it alone."""
    key = _process_key(process)

    def apply(current: dict[str, Any] | None) -> dict[str, Any] | None:
        changed = fn(None if current is None else _from_dict(ProcessRecord, key, current))
        return None if changed is None else _stamped(changed)

    value = update_json(store, key, apply)
    return None if value is None else _from_dict(ProcessRecord, key, value)


def read_processes(store: ObjectStore) -> dict[str, ProcessRecord]:
    """Process -> its record."""
    keys = store.list_after(paths.PROCESSES)
    records = map_requests(store, lambda key: _from_dict(ProcessRecord, key, read_json(store, key)), keys)
    return {record.process: record for record in records}


def _process_key(process: str) -> str:
    return paths.process(paths.name("process", process))


def _stamped(record: ProcessRecord) -> dict[str, Any]:
    return {**dataclasses.asdict(record), "updated_at": time.time()}

"""A run's supervised processes: claimed, kept fresh, observed and stopped through their records.

One record per process, changed by compare-and-swap only. Whoever launches claims the next attempt;
the supervisor of that attempt then keeps the record fresh and ends it with the exit code. A
supervisor whose attempt is no longer the recorded one has been fenced: it kills its children and
goes, so two attempts at one process never work side by side for longer than one refresh.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from typing import Literal

from tunix_core.errors import Fenced, StoreError
from tunix_core.processes import ProcessIdentity, identify, wait_until
from tunix_core.storage import control
from tunix_core.storage.control import ProcessRecord
from tunix_core.storage.store import ObjectStore

REFRESH_SECONDS = 2.0
"""How often a supervisor renews its record."""
STALE_SECONDS = 30.0
"""A record of another host that was not renewed for so long is of a lost process."""

State = Literal["absent", "running", "succeeded", "failed", "lost"]


class StillRunning(StoreError):
    """A process has to end before another submission of it can start."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    """What is known of a process. `lost`: it went without leaving an exit code."""

    state: State
    record: ProcessRecord | None = None

    @property
    def exit_code(self) -> int | None:
        return self.record.exit_code if self.record is not None else None

    @property
    def reason(self) -> str:
        if self.state == "lost":
            return "it vanished without an exit code: its supervisor was killed or its host went away"
        if self.state == "absent":
            return "it was never started"
        return self.record.reason if self.record is not None else ""


def identity(record: ProcessRecord) -> ProcessIdentity:
    """The supervisor's process (the launcher's while the record is `starting`)."""
    return ProcessIdentity(
        host=record.host, boot_id=record.boot_id, pid=record.pid or 0, pid_start=int(record.pid_start or 0)
    )


def is_gone(record: ProcessRecord) -> bool:
    """Whether it certainly runs no more: it left an exit code, or this host knows its pid is free."""
    owner = identity(record)
    return record.state == "exited" or (record.state == "running" and owner.is_local and not owner.is_alive())


class ProcessObserver:
    """Watches one process by its record alone.

    On its own host the pid decides. For another host a record counts as stale once it did not
    change for `stale_seconds` of this observer's clock; clocks of two hosts are never compared.
    """

    def __init__(self, store: ObjectStore, process: str, *, stale_seconds: float = STALE_SECONDS) -> None:
        self._store = store
        self.process = process
        self._stale_seconds = stale_seconds
        self._seen: ProcessRecord | None = None
        self._seen_at = time.monotonic()

    def _read(self) -> ProcessRecord | None:
        found = control.read_process(self._store, self.process)
        return None if found is None else found[0]

    def status(self) -> ProcessStatus:
        record = self._read()
        if record is None:
            return ProcessStatus(state="absent")
        if record != self._seen:
            self._seen, self._seen_at = record, time.monotonic()
        if record.state == "exited":
            return ProcessStatus(state="succeeded" if record.exit_code == 0 else "failed", record=record)
        if is_gone(record):
            if self._read() != record:  # it ended between the two looks
                return self.status()
            return ProcessStatus(state="lost", record=record)
        trusted = record.state == "running" and identity(record).is_local
        stale = time.monotonic() - self._seen_at >= self._stale_seconds
        return ProcessStatus(state="lost" if stale and not trusted else "running", record=record)

    def settle(self) -> ProcessStatus:
        """Like `status`, but another host's process is watched until it shows life or is known lost."""
        first = current = self.status()
        while current.state == "running" and current.record == first.record:
            assert current.record is not None
            if current.record.state == "running" and identity(current.record).is_local:
                break
            time.sleep(0.2)
            current = self.status()
        return current


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """`new`: the caller launches attempt `record.attempt`; otherwise the work is under way or done."""

    record: ProcessRecord
    new: bool


def claim(store: ObjectStore, process: str, submission_key: str, *, stale_seconds: float = STALE_SECONDS) -> Claim:
    """Claim the next attempt at a process, unless this submission runs or has succeeded already.

    Raises:
        StillRunning: it runs under another submission, which has to be stopped first.
    """
    observer = ProcessObserver(store, process, stale_seconds=stale_seconds)
    me = identify(os.getpid())
    while True:
        status = observer.settle()
        seen = status.record
        if seen is not None and seen.submission_key == submission_key and status.state in ("running", "succeeded"):
            return Claim(record=seen, new=False)
        if seen is not None and status.state == "running":
            raise StillRunning(f"{process} runs on {seen.host} (pid {seen.pid}) for submission {seen.submission_key!r}")
        mine = ProcessRecord(
            process=process,
            submission_key=submission_key,
            attempt=(seen.attempt if seen is not None else 0) + 1,
            host=me.host,
            boot_id=me.boot_id,
            pid=me.pid,
            pid_start=me.pid_start,
            state="starting",
        )
        if _replace(store, seen, mine):
            return Claim(record=mine, new=True)


def _replace(store: ObjectStore, seen: ProcessRecord | None, mine: ProcessRecord) -> bool:
    """Put `mine` in place of `seen`; False when someone else was faster."""
    taken = control.update_process(store, mine.process, lambda current: mine if current == seen else None)
    return taken is not None and dataclasses.replace(taken, updated_at=mine.updated_at) == mine


def publish(store: ObjectStore, record: ProcessRecord) -> ProcessRecord:
    """Renew the record of this attempt.

    Raises:
        Fenced: it belongs to another attempt by now, or someone else ended it.
    """

    def renew(current: ProcessRecord | None) -> ProcessRecord:
        if current is None or (current.attempt, current.submission_key) != (record.attempt, record.submission_key):
            raise Fenced(f"{record.process}: attempt {record.attempt} was superseded; the record says {current}")
        if current.state == "exited":
            raise Fenced(f"{record.process}: attempt {record.attempt} was ended: {current.reason}")
        return record

    renewed = control.update_process(store, record.process, renew)
    assert renewed is not None
    return renewed


def end(store: ObjectStore, record: ProcessRecord, reason: str) -> None:
    """Write off a process of someone else; its supervisor, should it live, is fenced by this."""

    def close(current: ProcessRecord | None) -> ProcessRecord | None:
        if current is None or current.attempt != record.attempt or current.state == "exited":
            return None
        return dataclasses.replace(current, state="exited", exit_code=-int(signal.SIGKILL), reason=reason)

    control.update_process(store, record.process, close)


def stop_process(store: ObjectStore, process: str, *, reason: str, submission_key: str | None = None) -> bool:
    """Ask a process to end, without waiting for it.

    On this host its supervisor gets SIGTERM: the children finish their unit of work, or are killed
    when their grace is over. On another host its record is ended, which fences it there.

    Args:
        submission_key: where given, a process of another submission is left alone.

    Returns:
        Whether it ran.
    """
    found = control.read_process(store, process)
    if found is None or is_gone(found[0]):
        return False
    record = found[0]
    if submission_key is not None and record.submission_key != submission_key:
        return False
    if record.state == "running" and identity(record).is_local:
        return identity(record).send(signal.SIGTERM)
    end(store, record, reason)
    return True


def stop_and_wait(store: ObjectStore, process: str, *, reason: str, grace_seconds: float) -> None:
    """Stop one process and return once it is gone: SIGTERM, grace, SIGKILL and the end of its record."""
    stop_process(store, process, reason=reason)

    def record() -> ProcessRecord | None:
        found = control.read_process(store, process)
        return None if found is None or is_gone(found[0]) else found[0]

    if not wait_until(lambda: record() is None, grace_seconds, 0.2):
        left = record()
        if left is not None:
            _kill(store, left, reason)


def _kill(store: ObjectStore, record: ProcessRecord, reason: str) -> None:
    owner = identity(record)
    if record.state == "running":
        owner.send(signal.SIGKILL)  # its children die with it
        wait_until(lambda: not owner.is_alive(), 5.0)
    end(store, record, f"killed: {reason}")


def stop_run(
    store: ObjectStore, *, reason: str, source: str, voluntary_seconds: float = 10.0, grace_seconds: float = 15.0
) -> dict[str, str]:
    """End every process of a run and return once none is left.

    First the stop object, which each process sees by itself; then SIGTERM; then SIGKILL, or for
    processes of other hosts the end of their record. Nothing is written when nothing runs.

    Returns:
        How each process that still ran came to its end: `stopped`, `terminated` or `killed`.
    """

    def running() -> dict[str, ProcessRecord]:
        return {name: record for name, record in control.read_processes(store).items() if not is_gone(record)}

    alive = running()
    if not alive:
        return {}
    control.request_stop(store, reason=reason, source=source, failed=True)
    outcome: dict[str, str] = {}
    stages: list[tuple[str, float, Callable[[str], object]]] = [
        ("stopped", voluntary_seconds, lambda _: None),
        ("terminated", grace_seconds, lambda name: stop_process(store, name, reason=reason)),
        ("killed", 0.0, lambda name: _kill(store, running()[name], reason) if name in running() else None),
    ]
    for word, seconds, act in stages:
        for name in running():
            act(name)
        wait_until(lambda: not running(), seconds, 0.25)
        outcome |= dict.fromkeys(alive.keys() - running().keys() - outcome.keys(), word)
    return outcome

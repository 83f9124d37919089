"""Upkeep of checkpoints: verify new ones, keep the newest verified, retire and later delete the rest.

A checkpoint counts only once every file of it was read back against its SHA-256. Retired are those
older than the `keep` newest verified ones, and broken ones as soon as a newer verified one exists.
Step records stay, and shards in one form or the other, so any retained checkpoint can be replayed from.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from tunix_core.config import RunConfig
from tunix_core.data.retention import Retention
from tunix_core.data.rounds import run_rounds
from tunix_core.errors import CorruptObject, ObjectMissing
from tunix_core.metrics import MetricRecorder
from tunix_core.storage.checkpoints import CheckpointStore
from tunix_core.storage.metrics_files import MetricFiles
from tunix_core.storage.store import ObjectStore


class Upkeep:
    """One `tend` after another; what was verified is remembered for this life only."""

    def __init__(self, store: ObjectStore, config: RunConfig, *, process: str) -> None:
        self._checkpoints = CheckpointStore(store)
        self._keep = config.checkpoint.keep
        self._grace_seconds = config.checkpoint.grace_seconds
        self.recorder = MetricRecorder(process)
        self._verified: set[int] = set()
        self._broken: dict[int, str] = {}
        self.num_deleted = 0
        self.retained: list[int] = []

    def tend(self) -> None:
        """Verify, retire, delete."""
        clocks = self._checkpoints.clocks()
        for clock in clocks:
            if clock not in self._verified and clock not in self._broken:
                self._verify(clock)
        verified = [clock for clock in clocks if clock in self._verified]
        self.retained = verified[-self._keep :]
        for clock in clocks:
            if clock in self._broken and self.retained and clock < self.retained[-1]:
                self._checkpoints.retire(clock, reason=self._broken[clock])
            elif clock in self._verified and clock not in self.retained:
                self._checkpoints.retire(clock, reason=f"older than the {self._keep} newest")
        if self.retained:  # without a verified one nothing goes: it may be the only way back
            deleted = self._checkpoints.delete_retired(grace_seconds=self._grace_seconds, protected=set(self.retained))
            self.num_deleted += len(deleted)

    def _verify(self, clock: int) -> None:
        started = time.monotonic()
        num_bytes, reason = 0, ""
        try:
            num_bytes = self._checkpoints.verify(clock)
            self._verified.add(clock)
        except (CorruptObject, ObjectMissing) as error:
            reason = str(error)
            self._broken[clock] = reason
        self.recorder.record(
            clock=clock, ok=int(not reason), num_bytes=num_bytes, verify_seconds=time.monotonic() - started
        )

    def progress(self, incarnation: str) -> dict[str, Any]:
        """For the heartbeat."""
        return {
            "incarnation": incarnation,
            "num_verified": len(self._verified),
            "verified_clock": max(self._verified, default=-1),
            "broken": {str(clock): reason for clock, reason in self._broken.items()},
            "retained": self.retained,
            "num_deleted": self.num_deleted,
        }


def tend_until_stopped(
    store: ObjectStore,
    config: RunConfig,
    *,
    process: str,
    incarnation: str,
    interrupted: threading.Event,
    log: Callable[[str], None],
) -> None:
    """The whole process: rounds until the run ends, one of them after its end."""
    upkeep = Upkeep(store, config, process=process)
    retention = Retention(store, config.retention, owner=f"{process}-{incarnation}")
    problem, due = "", 0.0

    def tend() -> None:
        nonlocal problem, due
        upkeep.tend()
        if time.monotonic() < due:
            return
        due = time.monotonic() + config.retention.interval_seconds
        try:
            retention.tend()
            found = ""
        except CorruptObject as error:  # nothing was let go because of it; the run goes on
            found = str(error)
        if found and found != problem:
            log(f"retention: {found}")
        problem = found

    run_rounds(
        store,
        tend,
        interval_seconds=config.checkpoint.verify_interval_seconds,
        process=process,
        metrics=MetricFiles(store, upkeep.recorder, incarnation=incarnation),
        progress=lambda: {**upkeep.progress(incarnation), **retention.progress(), "retention_problem": problem},
        interrupted=interrupted,
    )
    log(f"retained checkpoints {upkeep.retained}")

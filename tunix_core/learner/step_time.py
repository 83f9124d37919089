"""Where a step's wall time goes: each moment of the stepping thread counts in one part, so the parts add up.

A step lasts from the end of the update before it (or from the start of training) to the end of its own. What the
preparation thread does while the device works costs nothing; what it does while the learner stands still is
`pack` and `transfer`, and the rest of that standstill is waiting.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Literal, NamedTuple


class Preparation(NamedTuple):
    """Moments of a batch's making, of one monotonic clock."""

    chosen: float
    """Its groups were about to be taken out of the buffer."""
    packed: float
    """Its arrays were complete on the host."""
    placed: float
    """They had arrived on the device."""
    committed: float
    """Its step record was written."""


@dataclasses.dataclass(kw_only=True)
class StepTimes:
    """Of one step; the sum is its wall time."""

    wait_for_data_seconds: float = 0.0
    """No batch could be formed: too few groups."""
    throttled_seconds: float = 0.0
    """There were groups, but too stale ones on the mean."""
    pack_seconds: float = 0.0
    """The learner stood still while its batch was being chosen and packed."""
    transfer_seconds: float = 0.0
    """… while its batch was on the way to the device."""
    device_seconds: float = 0.0
    """From the dispatch of the update to its end."""
    other_seconds: float = 0.0
    """Step record, copies of weights for snapshots and checkpoints, bookkeeping."""

    @property
    def wall_seconds(self) -> float:
        return sum(dataclasses.astuple(self))

    @property
    def standstill_seconds(self) -> float:
        """Without a batch, throttling excluded: what pacing keeps small."""
        return self.wait_for_data_seconds + self.pack_seconds + self.transfer_seconds

    def columns(self) -> dict[str, float]:
        """For the metrics row and the heartbeat."""
        return {**dataclasses.asdict(self), "step_wall_seconds": self.wall_seconds}


class StepTimer:
    """A stopwatch of laps: `lap` gives the time since the last one to a part."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._mark = monotonic()
        self._times = StepTimes()
        self._wait_began = self._mark

    def start(self) -> None:
        """Training begins: what was before belongs to no step."""
        self._mark = self._monotonic()
        self._times = StepTimes()

    def lap(self, part: Literal["wait_for_data", "throttled", "device", "other"]) -> float:
        """Returns the seconds it gave to `part`."""
        now = self._monotonic()
        seconds, self._mark = now - self._mark, now
        name = f"{part}_seconds"
        setattr(self._times, name, getattr(self._times, name) + seconds)
        return seconds

    def wait_begins(self) -> None:
        """From here the laps are waiting, until `received`."""
        self.lap("other")
        self._wait_began = self._mark

    def received(self, made: Preparation) -> None:
        """The wait is over: the part of it in which the batch was in the making was none."""

        def within(begin: float, end: float) -> float:
            return max(0.0, min(end, self._mark) - max(begin, self._wait_began))

        times = self._times
        pack, transfer = within(made.chosen, made.packed), within(made.packed, made.placed)
        record = within(made.placed, made.committed)
        idle = times.wait_for_data_seconds + times.throttled_seconds - pack - transfer - record
        times.throttled_seconds = max(0.0, min(times.throttled_seconds, idle))
        times.wait_for_data_seconds = idle - times.throttled_seconds
        times.pack_seconds, times.transfer_seconds = pack, transfer
        times.other_seconds += record

    def finish(self) -> StepTimes:
        """The step has ended and the next one begins."""
        self.lap("other")
        times, self._times = self._times, StepTimes()
        return times

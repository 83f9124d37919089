"""How much the actor pool may have in flight, and when the learner waits: pure state machines.

No clock and no I/O: the learner's pulse and the simulations in the tests run the same code. Admission
counts whole groups. What is in flight comes back older by the steps taken meanwhile, so the pool
is kept just large enough that the learner does not wait (DESIGN section 6, "admission with headroom").
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal


def capacity_groups(
    *, target: int, groups_per_batch: int, queued_fresh: int, in_step: int, throttled_batches: int = 0
) -> int:
    """Groups that the whole pool may have in flight: started, and not yet read by the learner.

    `(target + 1)` batches, less what is queued fresh or being consumed. While the learner has less
    than a batch queued and none in its step, this is at least what the batch lacks: no setting stops.

    Args:
        target: batches of headroom beyond the one being gathered.
        queued_fresh: groups in the buffer that the next step may consume, those reserved for it included.
        in_step: groups that the running step consumes.
        throttled_batches: batches admitted on top while the learner waits for fresher data.
    """
    return max(0, (target + 1 + throttled_batches) * groups_per_batch - queued_fresh - in_step)


def share(rank: int, num_actors: int, capacity: int) -> int:
    """The part of `capacity` of the actor of this rank; shares add up to it, and one may be zero."""
    return capacity // num_actors + (rank < capacity % num_actors)


@dataclasses.dataclass
class TargetController:
    """Seeks the smallest target that keeps the learner from waiting.

    A step that waited raises the target at once. `patience` steps without waiting lower it by one; if
    the step after that waits, the lower target was wrong and patience doubles, so that probing gets
    rare where it does not pay. The ceiling leaves room for the publication lag: what is admitted
    now starts `lag` versions old and waits `target` steps, and must stay within the bound.
    """

    max_staleness: int
    target: int = -1
    calm_steps: int = 0
    patience: int = 8
    lag_steps: float = 1.0
    lowered: bool = False

    WAIT_TOLERANCE = 0.02
    """Share of a step's time that may be waiting without counting as such."""
    MAX_PATIENCE = 256

    def __post_init__(self) -> None:
        if self.target < 0:
            self.target = self.ceiling

    @property
    def ceiling(self) -> int:
        return max(0, self.max_staleness - 1 - math.floor(self.lag_steps))

    def observe_step(self, *, wait_seconds: float, step_seconds: float, publish_lag_steps: int) -> None:
        """Take in one consumed step.

        Args:
            wait_seconds: how long the device waited for the step's data (throttling excluded).
            step_seconds: how long the step itself took.
            publish_lag_steps: clock of the step minus the version published then.
        """
        self.lag_steps += 0.2 * (max(0, publish_lag_steps) - self.lag_steps)
        if wait_seconds > self.WAIT_TOLERANCE * step_seconds:
            if self.lowered:
                self.patience = min(2 * self.patience, self.MAX_PATIENCE)
            self.target += 1
            self.calm_steps, self.lowered = 0, False
        else:
            self.calm_steps += 1
            if self.calm_steps >= self.patience and self.target > 0:
                self.target -= 1
                self.calm_steps, self.lowered = 0, True
        self.target = min(self.target, self.ceiling)

    def state(self) -> dict[str, Any]:
        """JSON, for a checkpoint."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "max_staleness"}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        for name, value in state.items():
            setattr(self, name, value)
        self.target = min(self.target, self.ceiling)


def admission_open(*, max_staleness: int, clock: int, published_version: int) -> bool:
    """At bound 0 only what the current clock's weights produce can be consumed: wait for their publication."""
    return max_staleness > 0 or published_version >= clock


class Throttle:
    """Waits while the candidate batch is too stale on the mean, and not for ever.

    Waiting ages nothing, since the clock stands still. Time is passed in.
    """

    def __init__(self, *, max_mean_staleness: float, max_throttle_seconds: float) -> None:
        self._limit = max_mean_staleness
        self._max_seconds = max_throttle_seconds
        self._since = math.inf

    def reset(self) -> None:
        """A step was taken, or there is no candidate: the next wait starts anew."""
        self._since = math.inf

    def decide(self, mean_staleness: float, now: float) -> Literal["step", "wait", "override"]:
        """`override`: the wait has lasted `max_throttle_seconds`; step all the same and count it."""
        if mean_staleness <= self._limit:
            return "step"
        self._since = min(self._since, now)
        return "override" if now - self._since >= self._max_seconds else "wait"

"""How much the actor pool may have in flight, and when the learner waits: pure state machines.

No clock and no I/O: the learner's pulse and the simulations in the tests run the same code. Admission
counts whole groups. What is in flight comes back older by the steps taken meanwhile, so the pool
is kept just large enough that the learner does not wait (DESIGN section 6, "admission with headroom").
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np


def capacity_groups(
    *, target: int, groups_per_batch: int, queued_fresh: int, in_step: int, throttled_batches: int = 0
) -> int:
    """Groups that the whole pool may have in flight: started, and not yet read by the learner.

    `(target + 1)` batches, less what is queued fresh or being consumed. While the learner waits with
    less than a batch queued, this is at least what the batch lacks, whatever the target: no setting stops.

    Args:
        target: batches of headroom beyond the one being gathered.
        queued_fresh: groups in the buffer that the next step may consume, those reserved for it included.
        in_step: groups that the running step consumes.
        throttled_batches: batches admitted on top while the learner waits for fresher data.
    """
    return max(0, (target + 1 + throttled_batches) * groups_per_batch - queued_fresh - in_step)


def share(rank: int, num_actors: int, capacity: int) -> int:
    """The part of `capacity` of the actor of this rank; shares add up to it, and one may be zero."""
    assert 0 <= rank < num_actors, f"rank {rank} of {num_actors} actors"
    return int(shares(num_actors, capacity)[rank])


def shares(num_actors: int, capacity: int) -> np.ndarray:
    """Those of all ranks: int64 [num_actors]."""
    return capacity // num_actors + (np.arange(num_actors) < capacity % num_actors)


@dataclasses.dataclass
class TargetController:
    """Seeks the smallest target that keeps the learner from waiting.

    A step that waited raises the target at once. It is lowered by one after `patience` steps without
    waiting if on the mean a whole batch more than needed was queued when a step ended: one target
    less takes one batch out of the queue. Where a lowered target made the learner wait all the same, patience
    doubles, so that trying gets rare where it does not pay. The ceiling leaves room for the publication
    lag: what is admitted now starts `lag` versions old and waits `target` steps, and must stay within
    the bound.
    """

    max_staleness: int
    target: int = -1
    """Starts at the ceiling: too high costs some stale data, too low costs the accelerators."""
    patience: int = 8
    calm_steps: int = 0
    spare_sum: float = 0.0
    """Of `spare_batches` over the calm steps."""
    settling_steps: int = 0
    """Steps for which waiting is still the fault of the target before the last raise."""
    lowered: bool = False
    """The last change was a lowering."""
    lag_steps: float = 1.0
    """Mean publication lag, of the last five steps or so."""

    WAIT_TOLERANCE = 0.02
    """Share of a step's time that may be waiting without counting as such."""
    MAX_PATIENCE = 256
    SETTLING_STEPS = 2
    """What a raise admits has to be rolled out first."""

    def __post_init__(self) -> None:
        if self.target < 0:
            self.target = self.ceiling

    @property
    def ceiling(self) -> int:
        """max(0, max_staleness - 1 - publication lag in steps)."""
        # The mean nears a constant lag from below and never gets there: nine tenths of a step count as one.
        return max(0, self.max_staleness - 1 - math.floor(self.lag_steps + 0.1))

    def observe_step(
        self, *, wait_seconds: float, step_seconds: float, publish_lag_steps: int, spare_batches: float | None = None
    ) -> None:
        """Take in one consumed step.

        Args:
            wait_seconds: how long the device waited for the step's data (throttling excluded).
            step_seconds: how long the step itself took.
            publish_lag_steps: clock of the step minus the version published then.
            spare_batches: what was queued for the next step when this one ended, the groups prepared
                for it included, less the one batch it needs; in batches. None where nobody counts: then
                calm steps alone lower the target, by trial.
        """
        self.lag_steps += 0.2 * (max(0, publish_lag_steps) - self.lag_steps)
        waited = wait_seconds > self.WAIT_TOLERANCE * step_seconds
        if waited:
            self.calm_steps, self.spare_sum = 0, 0.0
        if self.settling_steps > 0:
            self.settling_steps -= 1
        elif waited:
            if self.lowered:
                self.patience = min(2 * self.patience, self.MAX_PATIENCE)
            self.target += 1
            self.settling_steps, self.lowered = self.SETTLING_STEPS, False
        else:
            self.calm_steps += 1
            self.spare_sum += 1.0 if spare_batches is None else spare_batches
            if self.calm_steps >= self.patience:
                if self.spare_sum >= self.calm_steps and self.target > 0:
                    self.target, self.lowered = self.target - 1, True
                self.calm_steps, self.spare_sum = 0, 0.0
        self.target = min(self.target, self.ceiling)

    def state(self) -> dict[str, Any]:
        """JSON, for a checkpoint."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "max_staleness"}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`, under a bound that may have changed since.

        Raises:
            ValueError: not a state of this class.
        """
        if set(state) != set(self.state()):
            raise ValueError(
                f"pacing state has the fields {sorted(state)}, accepted are {sorted(self.state())}: "
                "the checkpoint was written by another version; start from one of this version."
            )
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

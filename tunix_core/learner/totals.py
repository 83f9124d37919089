"""Running figures of a learner, over all its lives: in checkpoints, heartbeats and metrics rows."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass
class Totals:
    """Saved with each checkpoint, so a figure covers the run; what a crash undid is counted once, by its repetition."""

    busy_seconds: float = 0.0
    """Device time of updates on first-use tokens; repetitions after a crash do not count."""
    warm_seconds: float = 0.0
    """Wall time since the first step of each life, repetitions, waits and packing included."""
    warm_tokens: int = 0
    """Real tokens of those updates."""
    warm_flops: float = 0.0
    """Model FLOPs of those updates, see `models.flops`."""
    wait_seconds: float = 0.0
    """Of which the learner waited for data."""
    throttled_seconds: float = 0.0
    """Of which it waited for fresher data."""
    num_overrides: int = 0
    """Steps taken although the mean staleness was over its limit."""
    num_deferred_groups: int = 0
    num_nonfinite_steps: int = 0
    nonfinite_in_a_row: int = 0
    num_recoveries: int = 0
    num_replayed_steps: int = 0
    num_violations: int = 0
    """Trajectories over the staleness bound in a batch; anything but 0 is a bug."""
    max_staleness_seen: int = 0
    staleness_histogram: dict[int, int] = dataclasses.field(default_factory=dict)

    def count_batch(self, staleness: np.ndarray, bound: int) -> None:
        """Every batch of the run, once."""
        values, counts = np.unique(staleness, return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            self.staleness_histogram[value] = self.staleness_histogram.get(value, 0) + count
        self.max_staleness_seen = max(self.max_staleness_seen, *values.tolist(), 0)
        self.num_violations += int((staleness > bound).sum())

    def state(self) -> dict[str, Any]:
        """JSON values."""
        return {**dataclasses.asdict(self), "staleness_histogram": sorted(self.staleness_histogram.items())}

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Totals:
        """The inverse of `state`."""
        return cls(**{**state, "staleness_histogram": {int(k): int(v) for k, v in state["staleness_histogram"]}})


class BusyMeter:
    """`learner_busy_fraction`: device time of first-use updates over wall time, from the first step of each life on."""

    def __init__(self, totals: Totals, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._totals = totals
        self._monotonic = monotonic
        self._since: float | None = None

    def dispatched(self) -> None:
        """A first-use step goes to the device: from the first one on the learner is warm."""
        if self._since is None:
            self._since = self._monotonic()

    def completed(self, device_seconds: float, num_tokens: int, model_flops: float) -> None:
        """It has ended."""
        self._totals.busy_seconds += device_seconds
        self._totals.warm_tokens += num_tokens
        self._totals.warm_flops += model_flops
        self.tick()

    def tick(self) -> None:
        """Bring the wall time up to date."""
        if self._since is not None:
            now = self._monotonic()
            self._totals.warm_seconds += now - self._since
            self._since = now

    @property
    def fraction(self) -> float:
        return self._totals.busy_seconds / self._totals.warm_seconds if self._totals.warm_seconds > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Real tokens trained on, over the same wall time."""
        return self._totals.warm_tokens / self._totals.warm_seconds if self._totals.warm_seconds > 0 else 0.0

    @property
    def flops_per_second(self) -> float:
        """Model FLOPs over the same wall time."""
        return self._totals.warm_flops / self._totals.warm_seconds if self._totals.warm_seconds > 0 else 0.0

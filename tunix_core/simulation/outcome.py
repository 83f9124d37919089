"""What a simulated run came to."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

_BINS, _PER_DOUBLING = 512, 16


@dataclasses.dataclass
class Step:
    """One step of the learner."""

    ended_at: float
    staleness_mean: float
    target: int
    queued: int
    """Groups ready for the next step."""
    in_flight: int
    """Groups of the pool."""


@dataclasses.dataclass
class Outcome:
    """Groups are counted from the start, times and tokens in the second half, when the target has settled."""

    duration_seconds: float
    steps: list[Step] = dataclasses.field(default_factory=list)
    consumed: int = 0
    reused: int = 0
    """Groups that a step trained on once more."""
    discarded: int = 0
    staleness: dict[int, int] = dataclasses.field(default_factory=dict)
    """Staleness at consumption -> groups."""
    lost: int = 0
    """Groups that died with their actors."""
    overrides: int = 0
    longest_gap_seconds: float = 0.0
    """Between two steps."""
    late_busy_seconds: float = 0.0
    late_consumed_tokens: float = 0.0
    late_discarded_tokens: float = 0.0
    consumed_lengths: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(_BINS, np.int64))
    """Groups by the logarithm of their tokens."""
    discarded_lengths: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(_BINS, np.int64))

    # ---- written by the simulation -----------------------------------------------------------------

    def _is_late(self, now: float) -> bool:
        return now > self.duration_seconds / 2

    def begin_step(self, ages: np.ndarray, num_new: int, idle_seconds: float) -> None:
        """On groups of these ages, so many of them for the first time."""
        self.consumed += num_new
        self.reused += len(ages) - num_new
        self.longest_gap_seconds = max(self.longest_gap_seconds, idle_seconds)
        for age, count in zip(*np.unique(ages, return_counts=True), strict=True):
            self.staleness[int(age)] = self.staleness.get(int(age), 0) + int(count)

    def end_step(
        self, now: float, busy_seconds: float, staleness_mean: float, target: int, queued: int, in_flight: int
    ) -> None:
        self.steps.append(Step(now, staleness_mean, target, queued, in_flight))
        if self._is_late(now):
            self.late_busy_seconds += min(busy_seconds, now - self.duration_seconds / 2)

    def consume(self, tokens: np.ndarray, now: float) -> None:
        """Groups of so many tokens [M] are taken into a batch."""
        self.late_consumed_tokens += float(tokens.sum()) * self._is_late(now)
        self.consumed_lengths += _by_length(tokens)

    def discard(self, tokens: np.ndarray, now: float) -> None:
        """Groups of so many tokens [M] are over the bound."""
        self.discarded += len(tokens)
        self.late_discarded_tokens += float(tokens.sum()) * self._is_late(now)
        self.discarded_lengths += _by_length(tokens)

    # ---- read --------------------------------------------------------------------------------------

    @property
    def busy_fraction(self) -> float:
        """Of the second half."""
        return self.late_busy_seconds / (self.duration_seconds / 2)

    @property
    def discarded_fraction(self) -> float:
        """Of the groups."""
        return self.discarded / max(1, self.discarded + self.consumed)

    @property
    def discarded_token_fraction(self) -> float:
        """Of the tokens of the second half."""
        return self.late_discarded_tokens / max(1e-9, self.late_discarded_tokens + self.late_consumed_tokens)

    @property
    def discarded_by_length(self) -> list[float]:
        """Discarded fraction of the groups of each tenth, by tokens, the shortest first: whom the bound starves."""
        both = self.consumed_lengths + self.discarded_lengths
        ranks = np.cumsum(both) - both / 2
        tenth = np.minimum(10 * ranks / max(1, both.sum()), 9).astype(np.int64)
        of_all, of_discarded = (np.bincount(tenth, counts, 10) for counts in (both, self.discarded_lengths))
        return [round(float(share), 4) for share in of_discarded / np.maximum(1, of_all)]

    @property
    def mean_staleness(self) -> float:
        return sum(age * count for age, count in self.staleness.items()) / max(1, self.consumed + self.reused)

    @property
    def max_staleness(self) -> int:
        return max(self.staleness, default=0)

    @property
    def silence_seconds(self) -> float:
        """The longest time without a step, the end of the run included."""
        last = self.steps[-1].ended_at if self.steps else 0.0
        return max(self.longest_gap_seconds, self.duration_seconds - last)

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return {
            "steps": len(self.steps),
            "learner_busy_fraction": round(self.busy_fraction, 4),
            "discarded_fraction": round(self.discarded_fraction, 4),
            "discarded_token_fraction": round(self.discarded_token_fraction, 4),
            "discarded_by_length": self.discarded_by_length,
            "mean_staleness": round(self.mean_staleness, 3),
            "max_staleness": self.max_staleness,
            "staleness": {str(age): self.staleness[age] for age in sorted(self.staleness)},
            "reused": self.reused,
            "lost": self.lost,
            "overrides": self.overrides,
            "longest_gap_seconds": round(self.longest_gap_seconds, 2),
            "last_target": self.steps[-1].target if self.steps else None,
        }


def _by_length(tokens: np.ndarray) -> np.ndarray:
    """int64 [bins]: groups of so many tokens [M], in any unit, by the logarithm; a unit stands in the middle."""
    place = _BINS / 2 + _PER_DOUBLING * np.log2(np.maximum(tokens, 1e-9))
    return np.bincount(np.clip(place, 0, _BINS - 1).astype(np.int64), minlength=_BINS)

"""Medians with their spread, goals and how a benchmark words them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


class Sample(NamedTuple):
    """Of repeated measurements."""

    median: float
    low: float
    high: float
    num: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Sample:
        values = [float(value) for value in values]
        return cls(statistics.median(values), min(values), max(values), len(values))

    def inverse(self, numerator: float) -> Sample:
        """`numerator / value` of each: seconds become a rate."""
        return Sample(numerator / self.median, numerator / self.high, numerator / self.low, self.num)

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


class Goal(NamedTuple):
    """A figure that must reach a bound, or stay within it."""

    name: str
    value: float | None
    """None: it was not measured."""
    bound: float
    at_least: bool
    remedy: str = ""
    """Where it could not be measured."""

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        received = "not measured" if self.value is None else f"{self.value:.4g}"
        sentence = f"{self.name}: {received}, {'at least' if self.at_least else 'at most'} {self.bound:.4g}"
        return sentence if self.value is not None or not self.remedy else f"{sentence}. {self.remedy}"


def shortfalls(goals: Sequence[Goal]) -> list[str]:
    return [f"goal missed: {goal}" for goal in goals if not goal.met]


def time_calls(call: Callable[[], Any], *, seconds: float, at_least: int = 3, at_most: int = 200) -> Sample:
    """Seconds per call, after one that does not count; `call` must wait for its result."""
    call()
    taken: list[float] = []
    begun = time.perf_counter()
    while len(taken) < at_least or (time.perf_counter() - begun < seconds and len(taken) < at_most):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return Sample.of(taken)

"""Stand-in until rl.pacing is merged."""

from __future__ import annotations

import math
from typing import Any, Literal


def capacity_groups(*, target: int, groups_per_batch: int, queued_fresh: int, in_step: int) -> int:
    return max(0, (target + 1) * groups_per_batch - queued_fresh - in_step)


class Throttle:
    def __init__(self, *, max_mean_staleness: float, max_throttle_seconds: float) -> None:
        self._limit, self._seconds, self._since = max_mean_staleness, max_throttle_seconds, math.inf

    def reset(self) -> None:
        self._since = math.inf

    def decide(self, mean: float, now: float) -> Literal["step", "wait", "override"]:
        if mean <= self._limit:
            return "step"
        self._since = min(self._since, now)
        return "override" if now - self._since >= self._seconds else "wait"


class TargetController:
    def __init__(self, *, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self.target = min(2, max(0, max_staleness - 1))

    def state(self) -> dict[str, Any]:
        return {"target": self.target}

    def restore(self, state: dict[str, Any]) -> None:
        self.target = int(state["target"])

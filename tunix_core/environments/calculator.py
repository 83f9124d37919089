"""Sums of numbers too long to add in the head, through a calculator tool.

prompt  123+456
policy  calc 123+456
tool    579
policy  = 579
"""

from __future__ import annotations

import random
import re
from typing import NamedTuple

from tunix_core.config import EnvironmentConfig
from tunix_core.environments.base import Observation, StepResult, ToolWeather, draw_instance
from tunix_core.errors import EnvironmentFailure

_CALL = re.compile(r"calc (\d{1,12})([+*-])(\d{1,12})")
_ANSWER = re.compile(r"= (-?\d+)")
NOT_UNDERSTOOD = "?"


class CalculatorTask(NamedTuple):
    """One instance."""

    left: int
    right: int


class Calculator:
    """Reward 1 for `= <sum>` exactly; any answer ends the episode."""

    name = "calculator"

    def __init__(self, config: EnvironmentConfig, *, latency: bool = True, weather_seed: int = 0) -> None:
        self._config = config
        self._weather = ToolWeather(config, weather_seed, latency=latency)
        self._task: CalculatorTask | None = None
        self._malformed = 0
        self._calls = 0

    def task(self, seed: int) -> CalculatorTask:
        """The instance that `seed` names."""
        return draw_instance(seed, self._draw)

    def _draw(self, rng: random.Random) -> CalculatorTask:
        limit = 10**self._config.num_digits
        return CalculatorTask(rng.randrange(limit // 10, limit), rng.randrange(limit // 10, limit))

    async def reset(self, seed: int) -> Observation:
        self._task = self.task(seed)
        self._malformed = self._calls = 0
        return Observation(f"{self._task.left}+{self._task.right}")

    async def step(self, text: str) -> StepResult:
        if self._task is None:
            raise EnvironmentFailure("calculator: step before reset")
        answer = _ANSWER.fullmatch(text)
        if answer:
            reward = float(answer[1] == str(self._task.left + self._task.right))
            return StepResult("", reward, True, "", True, self._components(reward), 0.0)
        call = _CALL.fullmatch(text)
        if not call:
            self._malformed += 1
            return StepResult(NOT_UNDERSTOOD, 0.0, False, "", False, self._components(0.0), 0.0)
        self._calls += 1
        seconds = await self._weather.call()
        result = _calculate(int(call[1]), call[2], int(call[3]))
        return StepResult(str(result), 0.0, False, "calc", True, self._components(0.0), seconds)

    def _components(self, answer: float) -> dict[str, float]:
        return {"answer": answer, "malformed_calls": float(self._malformed), "tool_calls": float(self._calls)}

    def demonstration(self, seed: int) -> list[tuple[str, str]]:
        task = self.task(seed)
        return [
            ("prompt", f"{task.left}+{task.right}"),
            ("policy", f"calc {task.left}+{task.right}"),
            ("tool", str(task.left + task.right)),
            ("policy", f"= {task.left + task.right}"),
        ]


def _calculate(left: int, operator: str, right: int) -> int:
    if operator == "+":
        return left + right
    return left - right if operator == "-" else left * right

"""Two-hop lookup: a key leads to a key, that one to a value; only the tool knows which.

prompt  find c
policy  get c
tool    h
policy  get h
tool    483
policy  = 483
"""

from __future__ import annotations

import random
import re
import string
from typing import NamedTuple

from tunix_core.config import EnvironmentConfig
from tunix_core.environments.base import Observation, StepResult, ToolWeather, draw_instance
from tunix_core.errors import EnvironmentFailure

_CALL = re.compile(r"get ([a-z])")
_ANSWER = re.compile(r"= (\d+)")
NOT_UNDERSTOOD = "?"


class LookupTask(NamedTuple):
    """One instance."""

    first_key: str
    second_key: str
    value: str


class Lookup:
    """Reward 1 for `= <value>` exactly; any answer ends the episode."""

    name = "lookup"

    def __init__(self, config: EnvironmentConfig, *, latency: bool = True, weather_seed: int = 0) -> None:
        self._config = config
        self._keys = string.ascii_lowercase[: config.num_keys]
        self._weather = ToolWeather(config, weather_seed, latency=latency)
        self._task: LookupTask | None = None
        self._malformed = 0
        self._calls = 0

    def task(self, seed: int) -> LookupTask:
        """The instance that `seed` names."""
        return draw_instance(seed, self._draw)

    def _draw(self, rng: random.Random) -> LookupTask:
        first, second = rng.sample(self._keys, 2)
        digits = self._config.num_digits
        return LookupTask(first, second, f"{rng.randrange(10**digits):0{digits}d}")

    async def reset(self, seed: int) -> Observation:
        self._task = self.task(seed)
        self._malformed = self._calls = 0
        return Observation(f"find {self._task.first_key}")

    async def step(self, text: str) -> StepResult:
        if self._task is None:
            raise EnvironmentFailure("lookup: step before reset")
        answer = _ANSWER.fullmatch(text)
        if answer:
            reward = float(answer[1] == self._task.value)
            return StepResult("", reward, True, "", True, self._components(reward), 0.0)
        call = _CALL.fullmatch(text)
        if not call:
            self._malformed += 1
            return StepResult(NOT_UNDERSTOOD, 0.0, False, "", False, self._components(0.0), 0.0)
        self._calls += 1
        seconds = await self._weather.call()
        table = {self._task.first_key: self._task.second_key, self._task.second_key: self._task.value}
        found = table.get(call[1])
        return StepResult(
            found if found is not None else NOT_UNDERSTOOD,
            0.0,
            False,
            "get",
            found is not None,
            self._components(0.0),
            seconds,
        )

    def _components(self, answer: float) -> dict[str, float]:
        return {"answer": answer, "malformed_calls": float(self._malformed), "tool_calls": float(self._calls)}

    def demonstration(self, seed: int) -> list[tuple[str, str]]:
        task = self.task(seed)
        return [
            ("prompt", f"find {task.first_key}"),
            ("policy", f"get {task.first_key}"),
            ("tool", task.second_key),
            ("policy", f"get {task.second_key}"),
            ("tool", task.value),
            ("policy", f"= {task.value}"),
        ]

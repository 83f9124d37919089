"""Questions with one exact answer and one tool: the turns, the counts and the reward they share."""

from __future__ import annotations

import abc
import random
import re
from typing import Any, Generic, TypeVar

from tunix_core.environment_config import EnvironmentConfig
from tunix_core.environments.base import Observation, StepResult, ToolCall, ToolWeather, draw_instance
from tunix_core.errors import EnvironmentFailure

NOT_UNDERSTOOD = "?"

Task = TypeVar("Task")


class SingleTool(abc.ABC, Generic[Task]):
    """Reward 1 for exactly the right answer; any answer ends the episode.

    A kind of question names its tool and its patterns, draws its instances, and says what it asks,
    what the answer is and what a call returns.
    """

    name: str
    tool_name: str
    call: re.Pattern[str]
    """A whole message that calls the tool; its groups are the arguments."""
    answer: re.Pattern[str]
    """A whole message that answers; its first group is the answer."""
    instructions: str
    """See `Observation`."""

    def __init__(self, config: EnvironmentConfig, *, latency: bool = True, weather_seed: int = 0) -> None:
        self._options: Any = config.options
        self._weather = ToolWeather(config, weather_seed, latency=latency)
        self._task: Task | None = None
        self._malformed = 0
        self._calls = 0

    def task(self, seed: int) -> Task:
        """The instance that `seed` names."""
        return draw_instance(seed, self._draw)

    async def reset(self, seed: int) -> Observation:
        self._task = self.task(seed)
        self._malformed = self._calls = 0
        return Observation(self._question(self._task), self.instructions)

    async def step(self, message: str) -> StepResult:
        if self._task is None:
            raise EnvironmentFailure(f"{self.name}: step before reset")
        answer = self.answer.fullmatch(message)
        if answer:
            reward = float(answer[1] == self._solution(self._task))
            return StepResult("", reward, True, components=self._components(reward))
        call = self.call.fullmatch(message)
        if not call:
            self._malformed += 1
            return StepResult(NOT_UNDERSTOOD, 0.0, False, components=self._components(0.0))
        self._calls += 1
        await self._weather.call()
        found = self._use_tool(self._task, call)
        text_back, ok = (NOT_UNDERSTOOD, False) if found is None else (found, True)
        return StepResult(text_back, 0.0, False, (ToolCall(self.tool_name, ok),), self._components(0.0))

    async def close(self) -> None:
        """Holds nothing."""

    def _components(self, answer: float) -> dict[str, float]:
        return {"answer": answer, "malformed_calls": float(self._malformed), "tool_calls": float(self._calls)}

    # ---- of the kind of question ----------------------------------------------------------------

    @abc.abstractmethod
    def _draw(self, rng: random.Random) -> Task:
        """One instance."""

    @abc.abstractmethod
    def _question(self, task: Task) -> str:
        """What it asks."""

    @abc.abstractmethod
    def _solution(self, task: Task) -> str:
        """The right answer."""

    @abc.abstractmethod
    def _use_tool(self, task: Task, call: re.Match[str]) -> str | None:
        """What the tool returns; None where it finds nothing."""

    @abc.abstractmethod
    def demonstration(self, seed: int) -> list[tuple[str, str]]:
        """A perfect episode as `(role, text)`; see `Demonstrated.demonstration`."""

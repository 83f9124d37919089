"""Rewards as a weighted sum of named components, functions of an episode."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from tunix_core.errors import ConfigError
from tunix_core.tools.toolbox import CallRecord

COUNTERS = ("malformed_calls", "failed_calls", "tool_calls")
"""Components that every tool environment counts besides its rubric's."""
NONFINITE = "nonfinite_components"

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
    """What is there to be judged."""

    task: Any
    """The instance, as the environment drew it."""
    messages: Sequence[tuple[str, str]]
    """`(role, text)` with the roles prompt, policy and tool, the last policy message included."""
    calls: Sequence[CallRecord]
    """Those that were made, in order."""
    answer: str | None
    """None: the episode was ended before one."""


class Score(NamedTuple):
    reward: float
    components: dict[str, float]
    """By name, unweighted; `nonfinite_components` among them where there were some."""


class Component(NamedTuple):
    """A part of the reward."""

    name: str
    function: Callable[[Episode], float | Awaitable[float]]
    """Sync or async. What it raises costs the episode, as any fault of the environment does."""
    weight: float = 1.0
    """0: a metric only."""


class Rubric:
    """The reward is the sum of weight times component.

    A component that is not finite counts as 0 and in `nonfinite_components`: what reaches the learner is finite.

    Raises:
        ConfigError: a name twice or not of letters, digits and _, or a weight that is not finite.
    """

    def __init__(self, *components: Component) -> None:
        for component in components:
            where = f"rubric component {component.name}"
            if not _NAME.fullmatch(component.name) or component.name in (*COUNTERS, NONFINITE):
                raise ConfigError(where, component.name, f"a name of the form {_NAME.pattern}", "Choose another name.")
            if not math.isfinite(component.weight):
                raise ConfigError(where, component.weight, "a finite weight", "0 makes it a metric only.")
        names = [component.name for component in components]
        if len(set(names)) < len(names):
            raise ConfigError("rubric", names, "each name once", "Rename one of them.")
        self._components = components

    def unscored(self) -> dict[str, float]:
        """The components of an episode that goes on."""
        return {component.name: 0.0 for component in self._components}

    async def score(self, episode: Episode) -> Score:
        reward, values, num_nonfinite = 0.0, {}, 0
        for component in self._components:
            value = component.function(episode)
            if inspect.isawaitable(value):
                value = await value
            value = float(value)
            if not math.isfinite(value):
                value, num_nonfinite = 0.0, num_nonfinite + 1
            values[component.name] = value
            reward += component.weight * value
        if num_nonfinite:
            values[NONFINITE] = float(num_nonfinite)
        return Score(reward, values)

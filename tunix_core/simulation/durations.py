"""How long groups take, and how many tokens they come to."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tunix_core.simulation.setting import Setting

Draw = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
"""(generator, N) -> seconds [N] of groups and their tokens [N], in any unit."""


def lognormal(setting: Setting) -> Draw:
    """Episodes lognormal with the setting's mean and sigma; a group as long as its slowest, tokens in proportion to time."""
    location = math.log(setting.episode_seconds) - setting.sigma**2 / 2

    def draw(generator: np.random.Generator, num: int) -> tuple[np.ndarray, np.ndarray]:
        seconds = generator.lognormal(location, setting.sigma, (num, setting.group_size))
        seconds = np.minimum(seconds, setting.episode_limit_seconds)
        return seconds.max(1), seconds.sum(1)

    return draw


def empirical(seconds: np.ndarray, tokens: np.ndarray) -> Draw:
    """Groups as they were measured, drawn with replacement.

    Args:
        seconds: [M] from a group's start to its end.
        tokens: [M] of its trajectories together.
    """

    def draw(generator: np.random.Generator, num: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = generator.integers(0, len(seconds), num)
        return seconds[chosen], tokens[chosen]

    return draw

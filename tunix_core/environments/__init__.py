"""Tasks for an agent: text in, text out, through tools."""

from __future__ import annotations

from tunix_core.config import EnvironmentConfig
from tunix_core.environments.base import (
    Demonstrated,
    Environment,
    Observation,
    StepResult,
    ToolCall,
    split_of,
    task_seed,
)
from tunix_core.environments.calculator import Calculator
from tunix_core.environments.lookup import Lookup

__all__ = [
    "Demonstrated",
    "Environment",
    "Observation",
    "StepResult",
    "ToolCall",
    "make_environment",
    "split_of",
    "task_seed",
]


def make_environment(config: EnvironmentConfig, *, latency: bool = True, weather_seed: int = 0) -> Demonstrated:
    """An environment for one session.

    Args:
        config: which one, how hard, how slow.
        latency: false turns the injected latency off (evaluation); faults stay as configured.
        weather_seed: seeds latency and faults, apart from the task, so that the members of a group
            do not wait alike.
    """
    kind = Lookup if config.name == "lookup" else Calculator
    return kind(config, latency=latency, weather_seed=weather_seed)

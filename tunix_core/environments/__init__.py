"""Tasks for an agent: text in, text out, through tools."""

from __future__ import annotations

import dataclasses
import importlib
import typing
from typing import Any

from tunix_core.config_loading import build_options
from tunix_core.environment_config import OPTIONS, EnvironmentConfig, Table, installed_factory
from tunix_core.environments.base import (
    Demonstrated,
    Environment,
    Observation,
    StepResult,
    ToolCall,
    split_of,
    task_seed,
)
from tunix_core.errors import ConfigError

__all__ = [
    "FACTORIES",
    "Demonstrated",
    "Environment",
    "Observation",
    "StepResult",
    "ToolCall",
    "demonstrated",
    "make_environment",
    "split_of",
    "task_seed",
]

FACTORIES = {
    "lookup": "tunix_core.environments.lookup:Lookup",
    "calculator": "tunix_core.environments.calculator:Calculator",
    "python": "tunix_core.environments.python:PythonProgramming",
    "sql": "tunix_core.environments.sql:Sql",
    "files": "tunix_core.environments.files:Files",
    "reasoning_gym": "tunix_core.environments.adapters.reasoning_gym:ReasoningGym",
    "gymnasium": "tunix_core.environments.adapters.gymnasium:GymnasiumText",
    "textarena": "tunix_core.environments.adapters.games:TextArenaGame",
    "gem": "tunix_core.environments.adapters.games:GemGame",
    "verifiers": "tunix_core.environments.adapters.verifiers:VerifiersTask",
    "openenv": "tunix_core.environments.adapters.openenv:OpenEnvSession",
}
"""Name -> module and factory, imported when it is asked for; the options of the same name are in `OPTIONS`."""


def _factory(name: str) -> Any:
    if name not in OPTIONS:
        return installed_factory(name)
    module, _, attribute = FACTORIES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def make_environment(config: EnvironmentConfig, *, latency: bool = True, weather_seed: int = 0) -> Environment:
    """An environment for one session: what the factory of `config.name` makes of the same arguments.

    Args:
        config: which one, how hard, how slow.
        latency: false turns the injected latency off (evaluation); faults stay as configured.
        weather_seed: seeds latency and faults, apart from the task, so that the members of a group
            do not wait alike.

    Raises:
        ConfigError: nothing of that name is installed, or its options are not accepted.
    """
    factory = _factory(config.name)
    if isinstance(config.options, Table):
        config = dataclasses.replace(config, options=build_options(factory, config))
    return typing.cast(Environment, factory(config, latency=latency, weather_seed=weather_seed))


def demonstrated(config: EnvironmentConfig) -> Demonstrated:
    """The environment as one that plays its tasks itself, without injected latency.

    Raises:
        ConfigError: it cannot.
    """
    environment = make_environment(config, latency=False)
    if not hasattr(environment, "demonstration"):
        raise ConfigError(
            "environment.name",
            config.name,
            "an environment with demonstrations, for a warm start",
            "Start from a policy (start_uri), or as the model is (warm_start.num_steps = 0).",
        )
    return typing.cast(Demonstrated, environment)

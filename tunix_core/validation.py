"""How configurations refuse a value: the field, what it got, what it accepts, what to do."""

from __future__ import annotations

import importlib.util
import math
import typing
from typing import Any

from tunix_core.errors import ConfigError


def require(condition: bool, field: str, received: object, accepted: str, remedy: str) -> None:
    """Raises ConfigError unless `condition`."""
    if not condition:
        raise ConfigError(field, received, accepted, remedy)


def require_range(
    field: str, value: float, low: float, high: float = math.inf, remedy: str = "Choose a value in the range."
) -> None:
    """Raises ConfigError outside `[low, high]`."""
    require(low <= value <= high, field, value, f"{low} to {high}", remedy)


def require_choice(field: str, value: object, kind: Any) -> None:
    """Raises ConfigError unless `value` is one of the Literal `kind`."""
    accepted = typing.get_args(kind)
    require(value in accepted, field, value, ", ".join(map(str, accepted)), "Choose one of them.")


def require_package(module: str, extra: str) -> None:
    """Raises ConfigError where an optional dependency is not installed."""
    require(
        importlib.util.find_spec(module) is not None,
        "environment",
        f"no package {module!r}",
        f"the packages of the extra {extra!r}",
        f"Install it: pip install 'tunix-airflow[{extra}]'.",
    )

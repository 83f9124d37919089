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


def check_sampling(field: str, values: Any) -> None:
    """Raises ConfigError unless `values` can be sampled with: temperature, greedy, top_k, top_p, min_p."""
    require_range(f"{field}.temperature", values.temperature, 1e-3, 100, "Greedy is an option of its own.")
    require_range(f"{field}.top_k", values.top_k, 0, remedy="0 keeps all.")
    require_range(f"{field}.top_p", values.top_p, 1e-6, 1, "1 keeps all.")
    require_range(f"{field}.min_p", values.min_p, 0, 1, "0 keeps all.")
    for name, unused in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        value = getattr(values, name)
        require(
            not values.greedy or value == unused,
            f"{field}.{name}",
            value,
            f"{unused} with {field}.greedy",
            "The likeliest token is never cut off: choose one of the two.",
        )


def check_stop_string(field: str, text: str) -> None:
    """Raises ConfigError for a text that no message can end with."""
    require(
        bool(text) and "\ufffd" not in text,
        field,
        text,
        "text without U+FFFD, which stands for broken characters",
        "Leave it out, or name the text that ends a turn.",
    )


def require_package(module: str, extra: str) -> None:
    """Raises ConfigError where an optional dependency is not installed."""
    require(
        importlib.util.find_spec(module) is not None,
        "environment",
        f"no package {module!r}",
        f"the packages of the extra {extra!r}",
        f"Install it: pip install 'tunix-airflow[{extra}]'.",
    )

"""From recipes, overrides and saved JSON to a validated `RunConfig`, and back."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tunix_core.config import RunConfig
from tunix_core.environment_config import (
    OPTIONS,
    EnvironmentConfig,
    EnvironmentOptions,
    Table,
    installed_factory,
    options_type,
)
from tunix_core.errors import ConfigError
from tunix_core.validation import require, require_choice


def _coerce(kind: Any, value: Any, field: str) -> Any:
    """Check `value` against the annotation `kind`; TOML and JSON know no tuples and write 1 for 1.0."""
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), value, f"{field}.")
    if kind is Table:
        return _table(value, field)
    if origin is tuple:
        require(isinstance(value, list | tuple), field, value, "a list", "Write it as [a, b].")
        inner = typing.get_args(kind)[0]
        return tuple(_coerce(inner, item, f"{field}[{i}]") for i, item in enumerate(value))
    if origin is Literal:
        require_choice(field, value, kind)
        return value
    if origin in (typing.Union, types.UnionType):
        raise AssertionError(f"{field}: unions are not used in configurations")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    require(
        isinstance(value, kind) and not (kind is int and isinstance(value, bool)),
        field,
        value,
        f"a value of type {kind.__name__}",
        "Mend the value's type.",
    )
    return value


def _table(value: Any, field: str) -> Table:
    require(isinstance(value, Mapping), field, value, "a table", "Write it as a [section].")
    try:
        return Table(json.loads(json.dumps(value, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ConfigError(field, value, "text, finite numbers, booleans, lists and tables", f"{error}.") from error


def build(cls: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    """A configuration dataclass from plain values, each checked against its annotation.

    Raises:
        ConfigError: unknown field, wrong type, value out of range.
    """
    require(isinstance(values, Mapping), prefix.rstrip("."), values, "a table", "Write it as a [section].")
    hints = typing.get_type_hints(cls)
    if cls is EnvironmentConfig:
        hints["options"] = options_type(values.get("name", EnvironmentConfig.name))
    known = {f.name for f in dataclasses.fields(cls)}
    for key in values:
        require(
            key in known, f"{prefix}{key}", values[key], ", ".join(sorted(known)), "No such option: check its spelling."
        )
    return cls(**{key: _coerce(hints[key], value, f"{prefix}{key}") for key, value in values.items()})


def recipe_names() -> list[str]:
    """Names of the recipes that ship with the package."""
    folder = importlib.resources.files("tunix_core") / "recipes"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def load_recipe(recipe: str, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Read a recipe and apply overrides.

    Args:
        recipe: the name of a shipped recipe, or the path of a `.toml` file.
        overrides: `section.field` (or a top-level field) -> value.

    Raises:
        ConfigError: unknown recipe or option, wrong type, value out of range.
    """
    if recipe.endswith(".toml"):
        path = Path(recipe)
        require(path.is_file(), "recipe", recipe, "an existing .toml file", "Check the path.")
        text = path.read_text()
    else:
        require(
            recipe in recipe_names(),
            "recipe",
            recipe,
            ", ".join(recipe_names()),
            "Choose a shipped recipe or a .toml file.",
        )
        text = (importlib.resources.files("tunix_core") / "recipes" / f"{recipe}.toml").read_text()
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("recipe", recipe, "valid TOML", f"{error}.") from error
    config = config_from_dict({"recipe": Path(recipe).stem, **overridden(values, overrides or {})})
    return dataclasses.replace(config, environment=_with_installed_options(config.environment))


def _with_installed_options(config: EnvironmentConfig) -> EnvironmentConfig:
    """The options of an installed environment checked by its factory, every default spelled out.

    Not in `config_from_dict`: whoever only reads a run does not need the package.
    """
    if config.name in OPTIONS:
        return config
    checked = build_options(installed_factory(config.name), config)
    return dataclasses.replace(config, options=Table(json.loads(json.dumps(dataclasses.asdict(checked)))))


def build_options(factory: Any, config: EnvironmentConfig) -> EnvironmentOptions:
    """Options as the installed environment's factory wants them: of its attribute `options_type`, by default none.

    Raises:
        ConfigError: an unknown option, a wrong type or value.
    """
    return typing.cast(
        EnvironmentOptions,
        build(getattr(factory, "options_type", EnvironmentOptions), config.options_as_table(), "environment.options."),
    )


def overridden(values: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `section.field` (or deeper, or a top-level field) set to what `overrides` says; changed in place."""
    for key, value in overrides.items():
        *sections, field = key.split(".")
        target = values
        for section in sections:
            target = target.setdefault(section, {})
            require(isinstance(target, dict), key, value, "section.field", "No such section.")
        target[field] = value
    return values


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """`["learner.num_steps=10"]` -> `{"learner.num_steps": 10}`; values are JSON, or else text."""
    overrides = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        require(bool(separator and key), "override", pair, "section.field=value", "Write one '='.")
        try:
            overrides[key] = json.loads(text)
        except json.JSONDecodeError:
            overrides[key] = text
    return overrides


def config_from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Build and validate; the inverse of `config_to_dict`."""
    return typing.cast(RunConfig, build(RunConfig, values))


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain JSON values, every default spelled out."""
    return typing.cast(dict[str, Any], json.loads(json.dumps(dataclasses.asdict(config))))

"""A tool: a typed Python function, the schema that a policy is shown, and the check of what it calls it with."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunix_core.errors import ConfigError
from tunix_core.tools.schema import ACCEPTED, Field, Kind, convert_record, kind_of, record_schema

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_ARGUMENT = re.compile(r"\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)")


class ToolError(Exception):
    """A tool raises it for what the policy is to read as it stands; any other exception is shown with its type."""


class Tool:
    """One function.

    Args:
        function: sync or async, with annotated parameters; its docstring describes it, `Args:` in Google's
            style its parameters.
        name: other than the function's own.

    Raises:
        ConfigError: a parameter without annotation or schema, or one that cannot be given by name.
    """

    def __init__(self, function: Callable[..., Any], *, name: str = "") -> None:
        self.function = function
        self.name = name or getattr(function, "__name__", "")
        if not _NAME.fullmatch(self.name):
            raise ConfigError("tool", self.name, f"a name of the form {_NAME.pattern}", "Give it a name.")
        self.is_async = inspect.iscoroutinefunction(function)
        self.description, described = _docstring(inspect.getdoc(function) or "")
        self.fields = _fields(function, self.name, described)

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return record_schema(self.fields)

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON object that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What the function is called with.

        Raises:
            ArgumentError: an argument is unknown, missing or does not fit.
        """
        return convert_record(self.fields, given, "", True)


def make_tools(functions: Sequence[Callable[..., Any] | Tool]) -> dict[str, Tool]:
    """By name, in their order.

    Raises:
        ConfigError: two of one name.
    """
    tools: dict[str, Tool] = {}
    for function in functions:
        tool = function if isinstance(function, Tool) else Tool(function)
        if tool.name in tools:
            raise ConfigError("tools", tool.name, "each name once", "Rename one of them.")
        tools[tool.name] = tool
    return tools


def _fields(function: Callable[..., Any], name: str, described: Mapping[str, str]) -> list[Field]:
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(
            f"tool {name}", str(error), "annotations that can be resolved", "Define the types at module level."
        ) from error
    fields = []
    for parameter in inspect.signature(function).parameters.values():
        where = f"tool {name}, parameter {parameter.name}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(where, str(parameter), "parameters that can be given by name", "Write them out.")
        if parameter.name not in hints:
            raise ConfigError(where, "no annotation", ACCEPTED, "Annotate it.")
        kind = kind_of(hints[parameter.name], where)
        schema = dict(kind.schema)
        if parameter.name in described:
            schema.setdefault("description", described[parameter.name])
        if parameter.default is not parameter.empty:
            schema |= _default(parameter.default)
        fields.append(Field(parameter.name, Kind(schema, kind.convert), parameter.default is parameter.empty))
    for argument in described.keys() - {field.name for field in fields}:
        raise ConfigError(f"tool {name}", argument, "descriptions of its parameters", "Mend the docstring's Args.")
    return fields


def _default(value: Any) -> dict[str, Any]:
    """For the schema; nothing where JSON cannot say it."""
    try:
        return {"default": json.loads(json.dumps(value, allow_nan=False))}
    except (TypeError, ValueError):
        return {}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """What stands before the sections, and the descriptions under `Args:`."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if re.fullmatch(r"(Args|Arguments|Returns|Raises|Yields):", line)]
    description = " ".join(" ".join(lines[: starts[0]] if starts else lines).split())
    arguments: dict[str, str] = {}
    current, depth = "", -1
    for start in starts:
        if not lines[start].startswith("Arg"):
            continue
        for line in lines[start + 1 :]:
            indent = len(line) - len(line.lstrip())
            if line.strip() and indent == 0:
                break
            depth = indent if depth < 0 and line.strip() else depth
            named = _ARGUMENT.fullmatch(line.strip()) if indent == depth else None
            if named:
                current = named[1]
                arguments[current] = named[2].strip()
            elif current and line.strip():
                arguments[current] = f"{arguments[current]} {line.strip()}".strip()
    return description, arguments

"""Annotations to schemas and values; a function to a tool."""

import dataclasses
import enum
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, NotRequired, Optional, TypedDict

import pytest

from tunix_core.errors import ConfigError
from tunix_core.tools.functions import Tool, make_tools
from tunix_core.tools.schema import ArgumentError, Describe, Pattern, kind_of


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x is negative")


class Person(TypedDict):
    name: str
    age: NotRequired[int]


@dataclasses.dataclass
class Node:
    children: list["Node"]


INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (str, {"type": "string"}),
        (float, {"type": "number"}),
        (Any, {}),
        (Optional[int], {"anyOf": [INTEGER, {"type": "null"}]}),  # noqa: UP045  # both spellings are in use
        (int | str, {"anyOf": [INTEGER, {"type": "string"}]}),
        (Literal["a", 2], {"enum": ["a", 2]}),
        (Color, {"enum": ["red", "blue"]}),
        (list[int], {"type": "array", "items": INTEGER}),
        (list, {"type": "array", "items": {}}),
        (tuple[int, ...], {"type": "array", "items": INTEGER}),
        (
            tuple[int, bool],
            {"type": "array", "prefixItems": [INTEGER, {"type": "boolean"}], "minItems": 2, "maxItems": 2},
        ),
        (dict[str, int], {"type": "object", "additionalProperties": INTEGER}),
        (Annotated[int, Describe("How many.")], {"type": "integer", "description": "How many."}),
        (Annotated[str, Pattern("[a-z]")], {"type": "string", "pattern": "^(?:[a-z])$"}),
        (
            Point,
            {
                "type": "object",
                "properties": {"x": INTEGER, "y": INTEGER},
                "required": ["x"],
                "additionalProperties": False,
            },
        ),
        (
            Person,
            {
                "type": "object",
                "properties": {"name": {"type": "string"}, "age": INTEGER},
                "required": ["name"],
                "additionalProperties": False,
            },
        ),
    ],
)
def test_schemas(annotation: Any, schema: dict) -> None:
    assert kind_of(annotation, "here").schema == schema


@pytest.mark.parametrize(
    ("annotation", "value", "wanted"),
    [
        (int, 3.0, 3),
        (int, " 3", 3),
        (int, "-12", -12),
        (float, "2.5", 2.5),
        (float, 2, 2.0),
        (bool, "True", True),
        (str, "3", "3"),
        (int | str, "3", "3"),
        (int | None, None, None),
        (int | None, "null", None),
        (int | None, "3", 3),
        (Literal["a", 2], "2", 2),
        (Literal[1, True], True, True),
        (Color, "red", Color.RED),
        (list[int], [1, "2"], [1, 2]),
        (list[int], "[1, 2]", [1, 2]),
        (tuple[int, str], [1, "b"], (1, "b")),
        (dict[str, float], {"a": 1}, {"a": 1.0}),
        (Point, {"x": 1}, Point(1, 0)),
        (list[Point], [{"x": 1, "y": "2"}], [Point(1, 2)]),
        (Person, {"name": "n"}, {"name": "n"}),
    ],
)
def test_values_that_fit(annotation: Any, value: Any, wanted: Any) -> None:
    found = kind_of(annotation, "here").convert(value, "v", True)
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (int, 2.5, r"v: received 2\.5, accepted an integer"),
        (int, True, "accepted an integer"),
        (int, "3.0x", "accepted an integer"),
        (int, "9" * 65, "accepted an integer"),
        (float, "nan", "accepted a finite number"),
        (float, "1e999", "accepted a finite number"),
        (float, 10**400, "accepted a finite number"),
        (float, "x", "accepted a number"),
        (bool, 1, "accepted true or false"),
        (str, 3, "accepted a string"),
        (str, None, "received null, accepted a string"),
        (Literal[1], True, "accepted one of 1"),
        (Color, "green", 'accepted one of "red", "blue"'),
        (list[int], {"a": 1}, "accepted a list"),
        (list[int], [1, "b"], r"v\[1\]: received \"b\""),
        (tuple[int, int], [1], "accepted a list of 2"),
        (dict[str, int], {"a": "b"}, r"v\.a: received \"b\""),
        (int | None, "x", "accepted one of"),
        (Annotated[str, Pattern("[a-z]")], "ab", r"accepted text that matches \[a-z\]"),
        (Annotated[str, Pattern("[a-z]")], "a\n", "accepted text that matches"),
        (Point, {"y": 1}, r"v\.x: missing"),
        (Point, {"x": 1, "z": 1}, r"v\.z: unknown, accepted x, y"),
        (Point, {"x": -1}, "v: x is negative"),
        (Person, {"age": 3}, r"v\.name: missing"),
        (str, ["long" * 100], "…"),
    ],
)
def test_values_that_do_not_fit(annotation: Any, value: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        kind_of(annotation, "here").convert(value, "v", True)


@pytest.mark.parametrize(
    "annotation", [bytes, set[int], object, dict[int, str], Callable, Node, Annotated[int, "note"]]
)
def test_annotations_without_a_schema_are_refused(annotation: Any) -> None:
    with pytest.raises(ConfigError, match="here"):
        kind_of(annotation, "here")


def search(query: str, limit: int = 10, kind: Literal["page", "file"] = "page") -> str:
    """Searches the index.

    Slow.

    Args:
        query: words to
            look for.
        limit (int): how many
        kind: of what.

    Returns:
        Whatever: found.
    """
    return f"{query} {limit} {kind}"


def test_a_function_becomes_a_tool() -> None:
    tool = Tool(search)
    assert tool.schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches the index. Slow.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "words to look for."},
                    "limit": {"type": "integer", "description": "how many", "default": 10},
                    "kind": {"enum": ["page", "file"], "description": "of what.", "default": "page"},
                },
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }
    assert not tool.is_async
    assert search(**tool.arguments({"query": "a", "limit": "3"})) == "a 3 page"
    with pytest.raises(ArgumentError, match="limits: unknown, accepted query, limit, kind"):
        tool.arguments({"query": "a", "limits": 3})


def unannotated(a) -> None: ...  # type: ignore[no-untyped-def]
def positional(a: int, /) -> None: ...
def many(*a: int) -> None: ...
def of_bytes(a: bytes) -> None: ...
def unresolved(a: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821


def misdescribed(a: int) -> None:
    """Does.

    Args:
        b: not there.
    """


@pytest.mark.parametrize("function", [unannotated, positional, many, of_bytes, unresolved, misdescribed])
def test_functions_without_a_schema_are_refused_by_name(function: Callable) -> None:
    with pytest.raises(ConfigError, match=f"tool {function.__name__}"):
        Tool(function)


def test_two_tools_of_one_name_are_refused() -> None:
    assert list(make_tools([search, Tool(search, name="find")])) == ["search", "find"]
    with pytest.raises(ConfigError, match="each name once"):
        make_tools([search, search])
    with pytest.raises(ConfigError, match="a name of the form"):
        Tool(lambda: None)
    assert inspect.signature(search).parameters  # the function itself is as it was

"""From Python's type annotations to JSON schemas, and from JSON values to Python's.

`kind_of` turns an annotation once into a `Kind`: its schema, and the function that checks and converts a value. Values
are taken as they are where they fit; otherwise text that spells the wanted value is converted (policies write "3"
for 3, and the plain form of calls has nothing but text).
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tunix_core.errors import ConfigError
from tunix_core.tools.json_text import MAX_NUMBER_CHARACTERS, JsonError, parse_json

ACCEPTED = (
    "str, int, float, bool, None, Any, list, tuple, dict with str keys, Optional and unions, Literal, Annotated, enums, "
    "dataclasses and TypedDict of these"
)
_MAX_SHOWN = 60


class ArgumentError(ValueError):
    """A value does not fit, in words for the policy."""


class Kind(NamedTuple):
    """Of an annotation."""

    schema: dict[str, Any]
    convert: Callable[[Any, str, bool], Any]
    """`(value, name, text_allowed)`: the Python value; raises ArgumentError."""


@dataclasses.dataclass(frozen=True)
class Pattern:
    """In `Annotated[str, Pattern("[a-z]")]`: the whole text has to match."""

    expression: str


@dataclasses.dataclass(frozen=True)
class Describe:
    """In `Annotated[int, Describe("How many.")]`: for the schema."""

    text: str


def kind_of(annotation: Any, where: str) -> Kind:
    """Of an annotation at `where`, a name for messages.

    Raises:
        ConfigError: an annotation without a schema.
    """
    return _kind(annotation, where, ())


def _kind(annotation: Any, where: str, inside: tuple[Any, ...]) -> Kind:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _annotated(annotation, where, inside)
    if origin in (typing.Union, types.UnionType):
        return _union([_kind(argument, where, inside) for argument in arguments])
    if origin is Literal:
        return _choice(arguments, dict(zip(arguments, arguments, strict=True)))
    if annotation in _SIMPLE:
        return _SIMPLE[annotation]
    bare = origin or annotation
    if bare in (list, Sequence):
        return _list(_kind(arguments[0], f"{where}[]", inside) if arguments else _SIMPLE[Any])
    if bare is tuple and arguments:
        if arguments[-1] is Ellipsis:
            items = _list(_kind(arguments[0], f"{where}[]", inside))
            return Kind(items.schema, lambda value, name, text: tuple(items.convert(value, name, text)))
        return _tuple([_kind(argument, f"{where}[{i}]", inside) for i, argument in enumerate(arguments)])
    if bare in (dict, Mapping) and (not arguments or arguments[0] is str):
        return _dict(_kind(arguments[1], f"{where}{{}}", inside) if arguments else _SIMPLE[Any])
    if isinstance(annotation, type):
        if issubclass(annotation, enum.Enum):
            return _choice([member.value for member in annotation], {m.value: m for m in annotation})
        if dataclasses.is_dataclass(annotation) or typing.is_typeddict(annotation):
            if annotation in inside:
                raise ConfigError(where, annotation, "a type that does not contain itself", "Take the recursion out.")
            return _record(annotation, where, (*inside, annotation))
    raise ConfigError(where, annotation, ACCEPTED, "Annotate the parameter with one of these.")


# ---- plain values -------------------------------------------------------------------------------


def shown(value: Any) -> str:
    """A value as a message quotes it, cut short."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def _wrong(name: str, value: Any, wanted: str) -> ArgumentError:
    return ArgumentError(f"{name}: received {shown(value)}, accepted {wanted}")


def _any(value: Any, name: str, text: bool) -> Any:
    del name, text
    return value


def _string(value: Any, name: str, text: bool) -> str:
    del text
    if not isinstance(value, str):
        raise _wrong(name, value, "a string")
    return value


def _integer(value: Any, name: str, text: bool) -> int:
    if text and isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,64}", value.strip()):
        return int(value)
    if isinstance(value, float) and value.is_integer():  # JSON has one kind of number
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(name, value, "an integer")
    return value


def _number(value: Any, name: str, text: bool) -> float:
    found = math.nan
    if text and isinstance(value, str) and len(value) <= MAX_NUMBER_CHARACTERS:
        try:
            found = float(value)
        except ValueError:
            raise _wrong(name, value, "a number") from None
    elif isinstance(value, int | float) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
    if not math.isfinite(found):
        raise _wrong(name, value, "a finite number")
    return found


def _boolean(value: Any, name: str, text: bool) -> bool:
    if text and isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _null(value: Any, name: str, text: bool) -> None:
    if value is not None and not (text and value == "null"):
        raise _wrong(name, value, "null")


_NULL = Kind({"type": "null"}, _null)
_SIMPLE: dict[Any, Kind] = {
    Any: Kind({}, _any),
    str: Kind({"type": "string"}, _string),
    int: Kind({"type": "integer"}, _integer),
    float: Kind({"type": "number"}, _number),
    bool: Kind({"type": "boolean"}, _boolean),
    None: _NULL,
    type(None): _NULL,
}


def _choice(values: Sequence[Any], meanings: Mapping[Any, Any]) -> Kind:
    """One of a few JSON values."""

    def convert(value: Any, name: str, text: bool) -> Any:
        for accepted in values:
            if type(value) is type(accepted) and value == accepted:
                return meanings[accepted]
        for accepted in values:
            if text and isinstance(value, str) and value == str(accepted):
                return meanings[accepted]
        raise _wrong(name, value, "one of " + ", ".join(shown(accepted) for accepted in values))

    return Kind({"enum": list(values)}, convert)


def _annotated(annotation: Any, where: str, inside: tuple[Any, ...]) -> Kind:
    kind = _kind(annotation.__origin__, where, inside)
    for note in annotation.__metadata__:
        if isinstance(note, Describe):
            kind = Kind({**kind.schema, "description": note.text}, kind.convert)
        elif isinstance(note, Pattern):
            if kind.schema.get("type") != "string":
                raise ConfigError(where, annotation, "a pattern on str", "Remove the pattern.")
            kind = _matching(kind, note.expression)
        else:
            raise ConfigError(where, note, "Pattern, Describe", "Remove the note: a schema does not carry it.")
    return kind


def _matching(kind: Kind, expression: str) -> Kind:
    pattern = re.compile(expression)

    def convert(value: Any, name: str, text: bool) -> Any:
        found = kind.convert(value, name, text)
        if not pattern.fullmatch(found):
            raise _wrong(name, value, f"text that matches {expression}")
        return found

    return Kind({**kind.schema, "pattern": f"^(?:{expression})$"}, convert)


# ---- composed values ----------------------------------------------------------------------------


def _union(kinds: Sequence[Kind]) -> Kind:
    def convert(value: Any, name: str, text: bool) -> Any:
        # What fits as it is comes before what is converted: "3" for str | int stays text.
        for text_allowed in (False, True) if text else (False,):
            for kind in kinds:
                try:
                    return kind.convert(value, name, text_allowed)
                except ArgumentError:
                    continue
        raise _wrong(name, value, "one of " + json.dumps([kind.schema for kind in kinds]))

    return Kind({"anyOf": [kind.schema for kind in kinds]}, convert)


def _spelled(value: Any, text: bool) -> Any:
    """The list or object that a text spells."""
    if text and isinstance(value, str):
        try:
            return parse_json(value)
        except JsonError:
            return value
    return value


def _list(items: Kind) -> Kind:
    def convert(value: Any, name: str, text: bool) -> list[Any]:
        value = _spelled(value, text)
        if not isinstance(value, list):
            raise _wrong(name, value, "a list")
        return [items.convert(item, f"{name}[{i}]", text) for i, item in enumerate(value)]

    return Kind({"type": "array", "items": items.schema}, convert)


def _tuple(kinds: Sequence[Kind]) -> Kind:
    def convert(value: Any, name: str, text: bool) -> tuple[Any, ...]:
        value = _spelled(value, text)
        if not isinstance(value, list) or len(value) != len(kinds):
            raise _wrong(name, value, f"a list of {len(kinds)}")
        pairs = zip(kinds, value, strict=True)
        return tuple(kind.convert(item, f"{name}[{i}]", text) for i, (kind, item) in enumerate(pairs))

    size = len(kinds)
    return Kind(
        {"type": "array", "prefixItems": [kind.schema for kind in kinds], "minItems": size, "maxItems": size}, convert
    )


def _dict(values: Kind) -> Kind:
    def convert(value: Any, name: str, text: bool) -> dict[str, Any]:
        value = _spelled(value, text)
        if not isinstance(value, dict):
            raise _wrong(name, value, "an object")
        return {key: values.convert(item, f"{name}.{key}", text) for key, item in value.items()}

    return Kind({"type": "object", "additionalProperties": values.schema}, convert)


class Field(NamedTuple):
    """A parameter of a function, a field of a record."""

    name: str
    kind: Kind
    required: bool


def record_schema(fields: Sequence[Field]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {field.name: field.kind.schema for field in fields},
        "required": [field.name for field in fields if field.required],
        "additionalProperties": False,
    }


def convert_record(fields: Sequence[Field], value: Any, name: str, text: bool) -> dict[str, Any]:
    """The fields that are there, checked.

    Raises:
        ArgumentError: no object, an unknown or a missing field, or a value that does not fit.
    """
    prefix = f"{name}." if name else ""
    value = _spelled(value, text)
    if not isinstance(value, Mapping):
        raise _wrong(name or "arguments", value, "an object")
    known = {field.name: field for field in fields}
    for key in value:
        if key not in known:
            raise ArgumentError(f"{prefix}{key[:_MAX_SHOWN]}: unknown, accepted {', '.join(known) or 'no arguments'}")
    for field in fields:
        if field.required and field.name not in value:
            raise ArgumentError(f"{prefix}{field.name}: missing")
    return {key: known[key].kind.convert(item, f"{prefix}{key}", text) for key, item in value.items()}


def _record(cls: Any, where: str, inside: tuple[Any, ...]) -> Kind:
    """Of a dataclass or a TypedDict."""
    hints = typing.get_type_hints(cls, include_extras=True)
    if typing.is_typeddict(cls):
        required = {name: name in cls.__required_keys__ for name in hints}
        build: Callable[..., Any] = dict
    else:
        missing = dataclasses.MISSING
        own = [f for f in dataclasses.fields(cls) if f.init]
        required = {f.name: f.default is missing and f.default_factory is missing for f in own}
        build = cls
    fields = []
    for name, needed in required.items():
        hint = hints[name]
        while typing.get_origin(hint) in (typing.Required, typing.NotRequired):
            hint = typing.get_args(hint)[0]
        fields.append(Field(name, _kind(hint, f"{where}.{name}", inside), needed))

    def convert(value: Any, name: str, text: bool) -> Any:
        found = convert_record(fields, value, name, text)
        try:
            return build(**found)
        except (TypeError, ValueError) as error:  # a dataclass may check its fields when it is made
            raise ArgumentError(f"{name}: {error}") from error

    return Kind(record_schema(fields), convert)

"""JSON as policies write it: read strictly, in linear time, within bounds.

Python's own reader takes NaN, keeps the last of two equal keys, recurses as deep as the text says and makes halves of
surrogate pairs that cannot be written back as UTF-8. None of that is a value that a tool should get.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_DEPTH = 32
MAX_NUMBER_CHARACTERS = 64

_PIECES = re.compile(r'"(?:[^"\\]|\\.)*+(?:(?P<closed>")|\\?\Z)|(?P<open>[\[{])|(?P<close>[\]}])', re.DOTALL)
"""Strings, whose braces do not count, and brackets. A string that does not end reaches to the end of the text, so that
nothing is looked at twice."""


class JsonError(ValueError):
    """What is wrong, in words for the policy."""


def object_end(text: str, start: int) -> int:
    """The index after the object or list that begins at `start`.

    Raises:
        JsonError: it does not end, or is nested too deeply.
    """
    depth = 0
    for piece in _PIECES.finditer(text, start):
        if piece["open"]:
            depth += 1
            if depth > MAX_DEPTH:
                raise JsonError(f"nested more than {MAX_DEPTH} deep")
        elif piece["close"]:
            depth -= 1
            if depth <= 0:
                return piece.end()
        elif not piece["closed"]:
            break
    raise JsonError("not complete")


def parse_json(text: str) -> Any:
    """The value of a whole JSON text.

    Raises:
        JsonError: it is none, has a key twice, a number that is not finite or of too many digits, or half a surrogate
            pair, or is nested too deeply.
    """
    depth = 0
    for piece in _PIECES.finditer(text):
        depth += bool(piece["open"]) - bool(piece["close"])
        if depth > MAX_DEPTH:
            raise JsonError(f"nested more than {MAX_DEPTH} deep")
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_int=_integer, parse_float=_finite, parse_constant=_constant
        )
    except JsonError:
        raise
    except ValueError as error:
        raise JsonError(f"not JSON ({error})") from error
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise JsonError("half a surrogate pair") from error
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise JsonError(f"the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return found


def _integer(text: str) -> int:
    if len(text) > MAX_NUMBER_CHARACTERS:
        raise JsonError(f"a number of more than {MAX_NUMBER_CHARACTERS} characters")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise JsonError(f"the number {text[:MAX_NUMBER_CHARACTERS]}, which is not finite")
    return value


def _constant(text: str) -> float:
    raise JsonError(f"{text}, which is no JSON")

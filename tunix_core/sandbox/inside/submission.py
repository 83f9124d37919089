"""The process of submitted code under tests: answers what the tests, in another sandbox, ask of it.

Whatever happens here, forged answers included, is only what the submission's functions return: what the
tests expect never comes to this process, and no verdict leaves it.
"""

from __future__ import annotations

import itertools
import socket
import types
from collections.abc import Iterator
from typing import Any

from tunix_core.sandbox.inside import runner, wire

_MAX_ITEMS = 10_000
"""Taken from an iterator that a function returned."""
_MAX_CONSTANT_BYTES = 4096
"""Of a module's plain value that is sent along at once."""


def serve(channel: socket.socket, source: str) -> None:
    module = runner.main_module()
    module.__name__ = "submission"
    objects: dict[int, Any] = {}
    try:
        runner.execute(source, module)
        answer: dict[str, Any] = {"names": _names(module)}
    except BaseException as error:
        answer = _raised(error)
    channel.sendall(wire.frame(wire.to_json(answer)))
    while True:
        try:
            question = wire.from_json(wire.read_frame(channel, wire.MAX_FRAME_BYTES))
        except EOFError:
            return
        channel.sendall(_bounded(_answer(question, module, objects)))


def _names(module: types.ModuleType) -> dict[str, Any]:
    """Plain values encoded, None for what is asked for by its name."""
    names = {}
    for name, value in vars(module).items():
        if not name.startswith("__"):
            names[name] = _constant(value)
    return names


def _constant(value: Any) -> Any:
    def refuse(_: Any) -> wire.Handle:
        raise TypeError

    try:
        encoded = wire.encode(value, refuse)
    except TypeError:
        return None
    return encoded if len(wire.to_json(encoded)) <= _MAX_CONSTANT_BYTES else None


def _bounded(answer: dict[str, Any]) -> bytes:
    body = wire.to_json(answer)
    if len(body) > wire.MAX_FRAME_BYTES:
        body = wire.to_json({"raised": "ValueError", "text": f"a value of more than {wire.MAX_FRAME_BYTES} bytes"})
    return wire.frame(body)


def _answer(question: dict[str, Any], module: types.ModuleType, objects: dict[int, Any]) -> dict[str, Any]:
    def keep(value: Any) -> wire.Handle:
        number = len(objects)
        objects[number] = value
        return wire.Handle(number, type(value).__name__)

    def resolve(handle: wire.Handle) -> Any:
        return objects[handle.number]

    try:
        target = question["target"]
        result = getattr(module, target) if isinstance(target, str) else objects[target]
        for name in question["path"]:
            result = getattr(result, name)
        if question["call"]:
            arguments = wire.decode(question["args"], resolve)
            result = result(*arguments[0], **arguments[1])
        if question["drain"] or isinstance(result, Iterator):
            result = list(itertools.islice(result, _MAX_ITEMS))
        return {"value": wire.encode(result, keep)}
    except BaseException as error:
        return _raised(error)


def _raised(error: BaseException) -> dict[str, str]:
    """The nearest builtin type of an exception and its text."""
    builtin = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    try:
        text = str(error)
    except BaseException:
        text = ""
    name = builtin.__name__ if type(error) is builtin else type(error).__name__
    return {"raised": builtin.__name__, "name": name[:80], "text": text[:2000]}

"""The process of the tests: runs each of them against proxies of what the submission defines.

Of the submission come only plain values of exact builtin types, exceptions of builtin types, and
handles; so none of its code runs here, no `__eq__` of it decides, and it sees no test. The outcome of
each test goes to the pool, past the submission, which is in another sandbox.
"""

from __future__ import annotations

import builtins
import socket
import types
from collections.abc import Iterator
from typing import Any

from tunix_core.sandbox.inside import runner, wire

_MESSAGE_CHARACTERS = 500


class SubmissionError(Exception):
    """The submission raised what no builtin exception stands for."""


class SubmissionGone(BaseException):
    """The submission's process has ended or answers nonsense. No `except Exception` of a test takes it for an error."""


class _Submission:
    """The other end, through the pool."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def exchange(self, message: dict[str, Any]) -> Any:
        """Send to the pool; what is for the submission has its answer."""
        self._channel.sendall(wire.frame(wire.to_json(message)))
        return self._read()

    def _read(self) -> Any:
        body = wire.read_frame(self._channel, wire.MAX_FRAME_BYTES + 1)
        if body[:1] != b"A":
            raise SubmissionGone("the submission's process has ended")
        try:
            answer = wire.from_json(body[1:])
        except wire.MalformedMessage as error:
            raise SubmissionGone(str(error)) from None
        if type(answer) is not dict:
            raise SubmissionGone("an answer is no object")
        return answer

    def load(self) -> dict[str, Any]:
        """What the submission defines: plain values as they are, the rest as proxies."""
        answer = self._read()
        names = answer.get("names")
        if type(names) is not dict:
            raise _exception(answer)
        return {
            name: self._decode(value) if value is not None else Remote(self, name, [], name)
            for name, value in names.items()
            if name.isidentifier()
        }

    def _decode(self, value: Any) -> Any:
        try:
            return wire.decode(value, lambda handle: Remote(self, handle.number, [], handle.type_name))
        except (wire.MalformedMessage, RecursionError) as error:
            raise SubmissionGone(str(error)) from None

    def ask(self, target: str | int, path: list[str], arguments: Any = None, *, drain: bool = False) -> Any:
        question = {
            "target": target,
            "path": path,
            "call": arguments is not None,
            "args": wire.encode(arguments, _handle),
            "drain": drain,
        }
        answer = self.exchange({"ask": question})
        if "value" not in answer:
            raise _exception(answer)
        return self._decode(answer["value"])


def _handle(value: Any) -> wire.Handle:
    """Of an argument that is no plain value: what the submission defines or returned can be handed to it."""
    if type(value) is Remote:
        if isinstance(value._target, str):
            value = value._submission.ask(value._target, value._path)
        if type(value) is Remote and isinstance(value._target, int):
            return wire.Handle(value._target, "")
    raise TypeError(f"a test can pass plain values and what the submission returned, not {type(value).__name__}")


def _exception(answer: dict[str, Any]) -> Exception:
    raised, text = answer.get("raised"), answer.get("text")
    if type(raised) is not str or type(text) is not str:
        raise SubmissionGone("an answer is neither a value nor an exception")
    kind = getattr(builtins, raised, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or answer.get("name") != raised:
        # A subclass keeps its nearest builtin type, so that `except ValueError` works, and its name in the text.
        text = f"{answer.get('name', raised)}: {text}"
    try:
        assert isinstance(kind, type)
        assert issubclass(kind, Exception)
        return kind(text)
    except (AssertionError, TypeError):
        return SubmissionError(text)


class Remote:
    """Something of the submission: a function, a class, an object that is no plain value.

    Equal to nothing but itself, and neither true nor false: comparing asks nothing of the submission.
    """

    __slots__ = ("_name", "_path", "_submission", "_target")

    def __init__(self, submission: _Submission, target: str | int, path: list[str], name: str) -> None:
        self._submission, self._target, self._path, self._name = submission, target, path, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._submission.ask(self._target, self._path, (args, kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._submission.ask(self._target, [*self._path, name])

    def __getitem__(self, key: Any) -> Any:
        return self._method("__getitem__", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._method("__setitem__", key, value)

    def __contains__(self, item: Any) -> bool:
        return self._method("__contains__", item) is True

    def __len__(self) -> int:
        length = self._method("__len__")
        if type(length) is not int:
            raise TypeError(f"the length of {self!r} is no integer")
        return length

    def __iter__(self) -> Iterator[Any]:
        items = self._submission.ask(self._target, [*self._path, "__iter__"], ((), {}), drain=True)
        if type(items) is not list:
            raise TypeError(f"{self!r} is not iterable")
        return iter(items)

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r} is neither true nor false; compare a plain value of it")

    def __repr__(self) -> str:
        return f"<{self._name} of the submission>"

    def _method(self, name: str, *args: Any) -> Any:
        return self._submission.ask(self._target, [*self._path, name], (args, {}))


def check(channel: socket.socket, source: str) -> None:
    """Run the tests; tells the pool each outcome, under the number that the pool gave the test."""
    work = wire.from_json(source.encode())
    submission = _Submission(channel)
    namespace = dict(vars(runner.main_module()))
    try:
        defined = submission.load()
        # A submission that defines `len` or `sorted` must not decide what the tests mean by it.
        namespace |= {name: value for name, value in defined.items() if not hasattr(builtins, name) and name[0] != "_"}
        namespace |= {"submission": types.SimpleNamespace(**defined), "SubmissionError": SubmissionError}
        exec(compile(work["setup"], "setup.py", "exec", dont_inherit=True), namespace)
        refusal = ""
    except BaseException as error:
        refusal = _describe(error)
    for number, test in enumerate(work["tests"]):
        message = refusal or _run(test, dict(namespace))
        channel.sendall(wire.frame(wire.to_json({"test": number, "passed": not message, "message": message})))


def _run(test: str, namespace: dict[str, Any]) -> str:
    """Why it did not pass; empty for a pass."""
    try:
        exec(compile(test, "test.py", "exec", dont_inherit=True), namespace)
    except BaseException as error:
        return _describe(error)
    return ""


def _describe(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:
        text = ""
    return f"{type(error).__name__}: {text}"[:_MESSAGE_CHARACTERS]

"""The forms in which a message calls tools: what is read out of it, and how calls, results and answers are written.

plain    `NAME ARGUMENT … LAST ARGUMENT` is the whole message; arguments stand in the order of the tool's parameters and
         the last one goes on to the end, spaces and line ends included. `= ANSWER` answers. One call a message.
hermes   `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, several of them, text around (Hermes, Qwen).
llama3   `{"name": …, "parameters": {…}}`, several separated by `;`, after `<|python_tag|>` or alone (Llama 3).

In the last two a message without a call is the answer; what the policy thinks aloud (`<think>`) is none of it. They
read what vLLM's parsers read, and differ where those lose calls: a closing tag inside an argument, deep nesting and
`;` in a string are read rightly, and one broken call does not hide the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from tunix_core.tools.functions import Tool
from tunix_core.tools.json_text import JsonError, object_end, parse_json

Tools = Mapping[str, Tool]


class Call(NamedTuple):
    """A call as the message makes it; its arguments are not checked yet."""

    name: str
    arguments: Mapping[str, Any]


class Malformed(NamedTuple):
    """What was meant as a call and is none."""

    reason: str


class Parsed(NamedTuple):
    """Of one message."""

    calls: Sequence[Call | Malformed]
    answer: str | None
    """Of a message without calls."""


class Result(NamedTuple):
    """What one call came to."""

    name: str
    """Empty where the message named none."""
    text: str
    ok: bool


class ToolFormat(Protocol):
    """One form."""

    reply_role: Literal["tool", "user"]
    """Whom a chat template lets say the results, see `StepResult.role`."""
    native: bool
    """Chat templates of the models that write it take the tools' schemas."""

    def parse(self, message: str, tools: Tools) -> Parsed: ...

    def calls(self, calls: Sequence[Call], tools: Tools) -> str:
        """The message that makes these calls."""

    def answer(self, text: str) -> str:
        """The message that answers."""

    def results(self, results: Sequence[Result]) -> str:
        """The observation."""


# ---- plain --------------------------------------------------------------------------------------


class PlainFormat:
    reply_role: Literal["tool", "user"] = "tool"
    native = False
    _ANSWER = re.compile(r"= (.+)", re.DOTALL)
    _CALL = re.compile(r"([A-Za-z_][A-Za-z0-9_-]*)(?:[ \n](.*))?", re.DOTALL)

    def parse(self, message: str, tools: Tools) -> Parsed:
        answer = self._ANSWER.fullmatch(message)
        if answer:
            return Parsed((), answer[1])
        return Parsed((self._call(message, tools),), None)

    def _call(self, message: str, tools: Tools) -> Call | Malformed:
        found = self._CALL.fullmatch(message)
        if not found or found[1] not in tools:
            return Malformed(f"neither a call ({', '.join(tools)}) nor an answer (= …)")
        names = [field.name for field in tools[found[1]].fields]
        if found[2] is None:
            return Call(found[1], {})
        if not names:
            return Malformed(f"{found[1]} takes no arguments")
        return Call(found[1], dict(zip(names, found[2].split(" ", len(names) - 1), strict=False)))

    def calls(self, calls: Sequence[Call], tools: Tools) -> str:
        (call,) = calls
        names = [field.name for field in tools[call.name].fields]
        given = [str(call.arguments[name]) for name in names[: len(call.arguments)]]
        assert not any(" " in argument for argument in given[: len(names) - 1]), (
            "only the last argument may have spaces"
        )
        return " ".join([call.name, *given])

    def answer(self, text: str) -> str:
        return f"= {text}"

    def results(self, results: Sequence[Result]) -> str:
        (result,) = results
        return result.text


# ---- JSON ---------------------------------------------------------------------------------------

_THINK, _THOUGHT = "<think>", "</think>"


def _spoken(message: str) -> str:
    """The message after what the policy thinks aloud at its start. A template may have opened the thinking for it."""
    thinking, ended, rest = message.partition(_THOUGHT)
    if message.lstrip().startswith(_THINK):
        return rest
    begun = thinking.lstrip().startswith("{") or any(mark in thinking for mark in ("<tool_call>", "<|python_tag|>"))
    return rest if ended and not begun else message


def _call_of(value: Any, keys: Sequence[str]) -> Call | Malformed:
    """Of a JSON object with a name and, under one of the keys, the arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Malformed('a call is an object with a "name"')
    given = [key for key in keys if key in value]
    if len(given) > 1:
        return Malformed(f"both {given[0]} and {given[1]}")
    arguments = value[given[0]] if given else {}
    if isinstance(arguments, str):  # JSON within JSON, as some interfaces have it
        try:
            arguments = parse_json(arguments)
        except JsonError as error:
            return Malformed(f"{given[0]}: {error}")
    if not isinstance(arguments, dict):
        return Malformed(f"{given[0]} is an object")
    return Call(value["name"], arguments)


_SPACE = re.compile(r"\s*")


def _after_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return found.end() if found else start


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class HermesFormat:
    reply_role: Literal["tool", "user"] = "user"
    native = True
    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def parse(self, message: str, tools: Tools) -> Parsed:
        del tools
        said = _spoken(message)
        calls = list(self._calls(said))
        return Parsed(calls, None if calls else said.strip())

    def _calls(self, said: str) -> Iterator[Call | Malformed]:
        start = said.find(self._OPEN)
        while start >= 0:
            start += len(self._OPEN)
            begin, end = _after_space(said, start), -1
            try:
                if not said.startswith("{", begin):
                    raise JsonError(f"{self._OPEN} is followed by an object")
                end = object_end(said, begin)
                after = _after_space(said, end)
                # As vLLM does, the last closing tag may be missing: the end of the turn closes it.
                if after < len(said) and not said.startswith(self._CLOSE, after):
                    raise JsonError(f"the object is not followed by {self._CLOSE}")
                yield _call_of(parse_json(said[begin:end]), ("arguments",))
            except JsonError as error:
                yield Malformed(str(error))
            start = said.find(self._OPEN, end if end > 0 else start)

    def calls(self, calls: Sequence[Call], tools: Tools) -> str:
        del tools
        objects = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        return "\n".join(f"{self._OPEN}\n{_json(value)}\n{self._CLOSE}" for value in objects)

    def answer(self, text: str) -> str:
        return text

    def results(self, results: Sequence[Result]) -> str:
        return "\n".join(f"<tool_response>\n{result.text}\n</tool_response>" for result in results)


class Llama3Format:
    reply_role: Literal["tool", "user"] = "tool"
    native = True
    _TAG = "<|python_tag|>"

    def parse(self, message: str, tools: Tools) -> Parsed:
        del tools
        said = _spoken(message).strip()
        _, tag, after = said.partition(self._TAG)
        if not tag and not said.startswith("{"):
            return Parsed((), said)
        return Parsed(list(self._calls((after if tag else said).strip())), None)

    def _calls(self, text: str) -> Iterator[Call | Malformed]:
        start = 0
        while True:
            try:
                if not text.startswith("{", start):
                    raise JsonError("a call is a JSON object, several are separated by ;")
                end = object_end(text, start)
                yield _call_of(parse_json(text[start:end]), ("parameters", "arguments"))
            except JsonError as error:
                yield Malformed(str(error))
                return  # where the next one would begin is not to be known
            start = _after_space(text, end)
            if text.startswith(";", start):
                start = _after_space(text, start + 1)
            if start == len(text):
                return

    def calls(self, calls: Sequence[Call], tools: Tools) -> str:
        del tools
        return "; ".join(_json({"name": call.name, "parameters": dict(call.arguments)}) for call in calls)

    def answer(self, text: str) -> str:
        return text

    def results(self, results: Sequence[Result]) -> str:
        """One result as it is; several as one object a line."""
        if len(results) == 1:
            return results[0].text
        return "\n".join(_json({"name": result.name, "output": result.text}) for result in results)


FORMATS: dict[str, ToolFormat] = {"plain": PlainFormat(), "hermes": HermesFormat(), "llama3": Llama3Format()}
"""By the names of `environment.tool_format`."""

"""Conversations and preferences from JSON lines, one example a line; what is not one is refused by file and line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from tunix_core.errors import ConfigError, DataError

_CONVERSATION = '{"messages": [{"role": …, "content": text}, …]}'
_ORDER = "an optional system message, a user's, then an assistant's and a user's or tool's in turn"
_PREFERENCE = '{"prompt": text or [messages], "chosen": text, "rejected": text}'

Example = TypeVar("Example")


class Message(NamedTuple):
    """What somebody said."""

    role: str
    """`user`, `assistant` or `tool`."""
    text: str


class Conversation(NamedTuple):
    """A user's message first, then the assistant's and a user's or tool's in turn."""

    system: str | None
    messages: tuple[Message, ...]
    place: str
    """File and line, for what is wrong with it."""


class Preference(NamedTuple):
    """Two answers to the same prompt, which ends where the assistant speaks."""

    prompt: Conversation
    chosen: str
    rejected: str


def read_conversations(path: Path) -> list[Conversation]:
    """The conversations of a file, each ended by the assistant.

    Raises:
        ConfigError: no such file.
        DataError: a line is no such conversation; the message names it.
    """
    return _read_lines(path, _conversation, _CONVERSATION)


def read_preferences(path: Path) -> list[Preference]:
    """The pairs of a file; raises as `read_conversations` does."""
    return _read_lines(path, _preference, _PREFERENCE)


class _Refused(Exception):
    """What was received and what is accepted; becomes a DataError with file and line."""


def _refuse(field: str, received: object, accepted: str) -> NoReturn:
    shown = repr(received)
    raise _Refused(f"{field}: received {shown if len(shown) <= 80 else shown[:79] + '…'}, accepted {accepted}")


def _read_lines(path: Path, parse: Callable[[Mapping[str, Any], str], Example], accepted: str) -> list[Example]:
    if not path.is_file():
        raise ConfigError("--data", str(path), "an existing file", "Check the path.")
    found = []
    # Not splitlines: inside JSON text there may be other line separators than the newline.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            found.append(parse(_object(line, accepted), f"{path}:{number}"))
        except _Refused as refusal:
            raise DataError(f"{path}:{number}: {refusal}. Mend or remove the line.") from None
    return found


def _object(line: bytes, accepted: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # of UTF-8 as well as of JSON
        raise _Refused(f"received no JSON ({error}), accepted {accepted} in one line") from None
    if not isinstance(value, dict):
        _refuse("line", value, accepted)
    return value


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        _refuse(field, value, "text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        _refuse(field, value, "text without half a surrogate pair")
    return value


def _conversation(line: Mapping[str, Any], place: str) -> Conversation:
    if "tools" in line:
        _refuse("tools", line["tools"], "no such key: describe tools in the system message")
    if "messages" not in line:
        _refuse("keys", sorted(line), _CONVERSATION)
    conversation = _messages("messages", line["messages"], place)
    if conversation.messages[-1].role != "assistant":
        _refuse("messages", f"the last one of the {conversation.messages[-1].role}", "the assistant's last")
    return conversation


def _preference(line: Mapping[str, Any], place: str) -> Preference:
    missing = sorted({"prompt", "chosen", "rejected"} - line.keys())
    if missing:
        _refuse("keys", sorted(line), f"{_PREFERENCE}; missing: {', '.join(missing)}")
    chosen, rejected = _text("chosen", line["chosen"]), _text("rejected", line["rejected"])
    if chosen == rejected:
        _refuse("rejected", rejected, "another answer than the chosen one")
    if isinstance(line["prompt"], list):
        prompt = _messages("prompt", line["prompt"], place)
    else:
        prompt = Conversation(None, (Message("user", _text("prompt", line["prompt"])),), place)
    if prompt.messages[-1].role == "assistant":
        _refuse("prompt", "the last message the assistant's", "a user's or a tool's last: the answers come next")
    return Preference(prompt, chosen, rejected)


def _messages(field: str, value: object, place: str) -> Conversation:
    if not isinstance(value, list) or not value:
        _refuse(field, value, "a list of messages")
    messages = [_message(f"{field}[{place}]", message) for place, message in enumerate(value)]
    system = messages[0].text if messages[0].role == "system" else None
    rest = messages[system is not None :]
    if not rest or not _in_turn([message.role for message in rest]):
        _refuse(field, f"the roles {', '.join(message.role for message in messages)}", _ORDER)
    return Conversation(system, tuple(rest), place)


def _message(field: str, value: object) -> Message:
    if not isinstance(value, dict) or set(value) != {"role", "content"}:
        received = sorted(value) if isinstance(value, dict) else value
        _refuse(field, received, "the keys role and content (a call of a tool is part of the text)")
    if value["role"] not in ("system", "user", "assistant", "tool"):
        _refuse(f"{field}.role", value["role"], "system, user, assistant, tool")
    return Message(value["role"], _text(f"{field}.content", value["content"]))


def _in_turn(roles: Sequence[str]) -> bool:
    others = {"user", "tool"}
    return roles[0] == "user" and all(
        (role == "assistant") if i % 2 else (role in others) for i, role in enumerate(roles)
    )

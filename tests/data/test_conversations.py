"""JSON lines of conversations and preferences: read as they stand, or refused by file, line and reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunix_core.data.conversations import Conversation, Message, Preference, read_conversations, read_preferences
from tunix_core.errors import ConfigError, DataError


def message(role: str, text: str = "x") -> dict[str, str]:
    return {"role": role, "content": text}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_conversations_are_read_as_they_stand(tmp_path: Path) -> None:
    system, user = message("system", "Be short."), message("user", "2+2?\u2028")
    turns = [message("assistant", "calc 2+2"), message("tool", "4"), message("assistant", "4"), message("user", "?")]
    path = write(
        tmp_path / "a.jsonl",
        {"messages": [system, user, *turns, message("assistant", "")], "source": "elsewhere"},
        "  ",
        json.dumps({"messages": [user, message("assistant")]}, ensure_ascii=False),
    )
    first, second = read_conversations(path)
    assert first.system == "Be short."
    assert first.messages[:2] == (Message("user", "2+2?\u2028"), Message("assistant", "calc 2+2"))
    assert [m.role for m in first.messages] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert second == Conversation(None, (Message("user", "2+2?\u2028"), Message("assistant", "x")), f"{path}:3")


GOOD = [message("user"), message("assistant")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"messages": ', r"received no JSON .*accepted \{\"messages\""),
        ("[" * 100_000, "received no JSON"),
        ([1], r"line: received \[1\]"),
        ({"text": "a"}, r"keys: received \['text'\], accepted \{\"messages\""),
        ({"messages": []}, r"messages: received \[\], accepted a list of messages"),
        ({"messages": "hello"}, "messages: received 'hello'"),
        ({"messages": [*GOOD, {"role": "user"}]}, r"messages\[2\]: received \['role'\], accepted the keys role and"),
        ({"messages": [GOOD[0], {**GOOD[1], "tool_calls": []}]}, r"messages\[1\]: received .*'tool_calls'"),
        ({"messages": [message("human"), GOOD[1]]}, r"messages\[0\].role: received 'human', accepted system, user"),
        ({"messages": [GOOD[0], {**GOOD[1], "content": None}]}, r"messages\[1\].content: received None, accepted text"),
        ({"messages": [GOOD[0], {**GOOD[1], "content": [{}]}]}, r"content: received \[\{\}\], accepted text"),
        ({"messages": [message("user", "\ud800"), GOOD[1]]}, "half a surrogate pair"),
        ({"messages": GOOD[:1]}, "received 'the last one of the user', accepted the assistant's last"),
        ({"messages": [message("system")]}, "received 'the roles system'"),
        ({"messages": [GOOD[1]]}, "received 'the roles assistant', accepted an optional system"),
        ({"messages": [*GOOD, message("system"), *GOOD]}, "the roles user, assistant, system"),
        ({"messages": [*GOOD, GOOD[1]]}, "the roles user, assistant, assistant"),
        ({"messages": [message("tool"), GOOD[1]]}, "the roles tool, assistant"),
        ({"messages": GOOD, "tools": []}, r"tools: received \[\], accepted no such key"),
    ],
)
def test_other_lines_are_refused(tmp_path: Path, line: Any, said: str) -> None:
    path = write(tmp_path / "bad.jsonl", {"messages": GOOD}, line)
    with pytest.raises(DataError, match=r"bad\.jsonl:2: .*" + said):
        read_conversations(path)


def test_other_bytes_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"messages": "\xe9"}')
    with pytest.raises(DataError, match=r"latin\.jsonl:1: received no JSON .*utf-8"):
        read_conversations(path)
    with pytest.raises(ConfigError, match=r"--data: received .*accepted an existing file"):
        read_conversations(tmp_path)


PAIR = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}


def test_preferences_are_read_as_they_stand(tmp_path: Path) -> None:
    prompt = [message("system", "s"), *GOOD, message("tool", "4")]
    path = write(tmp_path / "a.jsonl", PAIR, {**PAIR, "prompt": prompt, "id": 7})
    first, second = read_preferences(path)
    assert first == Preference(Conversation(None, (Message("user", "2+2?"),), f"{path}:1"), "4", "5")
    assert second.prompt.system == "s"
    assert [m.role for m in second.prompt.messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"chosen": None}, "chosen: received None, accepted text"),
        ({"rejected": "4"}, "rejected: received '4', accepted another answer"),
        ({"prompt": 3}, "prompt: received 3, accepted text"),
        ({"prompt": GOOD}, "prompt: received 'the last message the assistant's'|prompt: .*answers come next"),
        ({"prompt": [GOOD[1]]}, "prompt: received 'the roles assistant'"),
    ],
)
def test_other_pairs_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=r"bad\.jsonl:1: .*(" + said + ")"):
        read_preferences(write(tmp_path / "bad.jsonl", {**PAIR, **changes}))


def test_a_missing_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"bad\.jsonl:1: keys: received \['chosen', 'prompt'\].*missing: rejected"):
        read_preferences(write(tmp_path / "bad.jsonl", {"prompt": "a", "chosen": "b"}))

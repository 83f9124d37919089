"""Calls in messages: every form writes what it reads, and reads what policies get wrong without an exception."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunix_core.tools.formats import FORMATS, Call, Malformed, Result
from tunix_core.tools.functions import make_tools
from tunix_core.tools.json_text import MAX_DEPTH
from tunix_core.tools.rendering import instructions_with_tools, plain_instructions


def get(key: str) -> str:
    """Looks up.

    Args:
        key: what to look up.
    """
    return key


def write(path: str, content: str) -> None:
    """Writes."""


def ls() -> str:
    return ""


TOOLS = make_tools([get, write, ls])


def read(form: str, message: str) -> list[Any]:
    """Calls as `(name, arguments)`, malformed ones as None; an answer as its text."""
    parsed = FORMATS[form].parse(message, TOOLS)
    assert (parsed.answer is None) == bool(parsed.calls)
    if parsed.answer is not None:
        return [parsed.answer]
    return [None if isinstance(call, Malformed) else (call.name, dict(call.arguments)) for call in parsed.calls]


GET = ("get", {"key": "a"})


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("get a", [GET]),
        ("get a b", [("get", {"key": "a b"})]),
        ("get", [("get", {})]),
        ("ls", [("ls", {})]),
        ("ls x", [None]),
        ("write a.txt two words\nand a line", [("write", {"path": "a.txt", "content": "two words\nand a line"})]),
        ("write a.txt ", [("write", {"path": "a.txt", "content": ""})]),
        ("write a.txt", [("write", {"path": "a.txt"})]),
        ("fetch a", [None]),
        ("", [None]),
        ("=", [None]),
        ("= ", [None]),
        ("= 12\n3", ["12\n3"]),
        ("get<pad> c", [None]),
        (" get a", [None]),
    ],
)
def test_plain(message: str, wanted: list) -> None:
    assert read("plain", message) == wanted


def hermes(value: str) -> str:
    return f"<tool_call>\n{value}\n</tool_call>"


ONE = '{"name": "get", "arguments": {"key": "a"}}'


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (hermes(ONE), [GET]),
        (f"I look.{hermes(ONE)} and {hermes(ONE)} done", [GET, GET]),
        (f"<tool_call>{ONE}", [GET]),
        (f"<tool_call>{ONE}{hermes(ONE)}", [None, GET]),
        (f"<tool_call>{ONE} x</tool_call>{hermes(ONE)}", [None, GET]),
        (hermes('{"name": "get", "arguments": {"key": "</tool_call>{"}}'), [("get", {"key": "</tool_call>{"})]),
        (hermes('{"name": "get", "arguments": {"key": "<tool_call>"}}'), [("get", {"key": "<tool_call>"})]),
        (hermes('{"name": "get", "arguments": {"key": {"a": [{"b": {}}]}}}'), [("get", {"key": {"a": [{"b": {}}]}})]),
        (hermes('{"name": "get", "arguments": {"key": "\\u00e9\\n\\ud83d\\ude00"}}'), [("get", {"key": "é\n😀"})]),
        (hermes('{"name": "get", "arguments": {"key": "\\ud83d"}}'), [None]),
        (hermes('{"name": "get", "arguments": "{\\"key\\": \\"a\\"}"}'), [GET]),
        (hermes('{"name": "ls"}'), [("ls", {})]),
        (hermes('{"name": "get", "arguments": ["a"]}'), [None]),
        (hermes('{"name": 3, "arguments": {}}'), [None]),
        (hermes('{"arguments": {}}'), [None]),
        (hermes('["get"]'), [None]),
        (hermes('{"name": "get", "name": "ls"}'), [None]),
        (hermes("{'name': 'get'}"), [None]),
        (hermes('{"name": "get", "arguments": {"key": "a"'), [None]),
        (hermes('{"name": "get", "arguments": {"key": NaN}}'), [None]),
        (hermes('{"name": "get", "arguments": {"key": 1e999}}'), [None]),
        (hermes('{"name": "get", "arguments": {"key": ' + "9" * 5000 + "}}"), [None]),
        (hermes('{"name": "get", "arguments": {"key": ' + "[" * 100_000 + "}}"), [None]),
        (hermes('{"name": "get", "arguments": {"key": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}}"), [None]),
        (hermes('{"name": "get", "arguments": "' + "[" * 50 + '"}'), [None]),
        (hermes("") + hermes(ONE), [None, GET]),
        (f"<think>{hermes(ONE)}</think> It is 7. ", ["It is 7."]),
        (f"<think>{hermes(ONE)}", [""]),
        (f"thinking</think>{hermes(ONE)}", [GET]),
        (hermes('{"name": "get", "arguments": {"key": "<think>a</think>"}}'), [("get", {"key": "<think>a</think>"})]),
        (" 7 ", ["7"]),
        ("", [""]),
    ],
)
def test_hermes(message: str, wanted: list) -> None:
    assert read("hermes", message) == wanted


TWO = '{"name": "get", "parameters": {"key": "a"}}'


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (TWO, [GET]),
        (ONE, [GET]),
        (f"<|python_tag|>{TWO}", [GET]),
        (f"I look. <|python_tag|>{TWO}; {TWO};{ONE} ;", [GET, GET, GET]),
        (f"{TWO}\n{TWO}", [GET, GET]),
        ('{"name": "get", "parameters": {"key": "a;{"}}; ' + TWO, [("get", {"key": "a;{"}), GET]),
        ('{"type": "function", "name": "get", "parameters": {"key": "a"}}', [GET]),
        ('{"name": "get", "parameters": {}, "arguments": {}}', [None]),
        (f"{TWO}; nothing", [GET, None]),
        ('{"name": "get", "parameters": {"key": "a"}', [None]),
        ("<|python_tag|>print(1)", [None]),
        ("{}", [None]),
        ("The set {1, 2}.", ["The set {1, 2}."]),
        (f"<think>{TWO}</think>7", ["7"]),
        ('{"name": "get", "parameters": {"key": "</think>"}}', [("get", {"key": "</think>"})]),
    ],
)
def test_llama3(message: str, wanted: list) -> None:
    assert read("llama3", message) == wanted


@pytest.mark.parametrize("form", FORMATS)
@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "</think>", *'{}[]";,:\\\ud800é\n =', ONE, TWO, "get a"]))
)
def test_no_message_raises(form: str, pieces: list[str]) -> None:
    read(form, "".join(pieces))


@pytest.mark.parametrize("form", ["hermes", "llama3"])
@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.text(max_size=5),
            st.recursive(
                st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.text(),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
                max_leaves=6,
            ),
            max_size=3,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_what_is_written_is_read(form: str, arguments: list[dict]) -> None:
    message = FORMATS[form].calls([Call("get", given) for given in arguments], TOOLS)
    assert read(form, message) == [("get", given) for given in arguments]


def test_plain_writes_what_it_reads() -> None:
    call = Call("write", {"path": "a.txt", "content": "two words\n"})
    assert read("plain", FORMATS["plain"].calls([call], TOOLS)) == [tuple(call)]
    assert read("plain", FORMATS["plain"].answer("x y")) == ["x y"]


@pytest.mark.parametrize(
    "message",
    [
        "<tool_call>{" * 5_000,
        '<tool_call>{"' * 5_000,
        '{"name": "' + '\\"' * 200_000,
        '<tool_call>{"name": "' + '\\"' * 200_000 + "\\",
        "<tool_call>" + " " * 200_000,
        "<think>" * 30_000,
        '<tool_call>{"a": ' + "[]," * 100_000,
    ],
)
@pytest.mark.parametrize("form", FORMATS)
def test_hostile_messages_are_read_in_linear_time(form: str, message: str) -> None:
    started = time.process_time()
    FORMATS[form].parse(message, TOOLS)
    assert time.process_time() - started < 5  # quadratic ones take minutes


def test_results_in_each_form() -> None:
    results = [Result("get", "h", True), Result("ls", "error: no", False)]
    assert FORMATS["plain"].results(results[:1]) == "h"
    assert (
        FORMATS["hermes"].results(results)
        == "<tool_response>\nh\n</tool_response>\n<tool_response>\nerror: no\n</tool_response>"
    )
    assert FORMATS["llama3"].results(results[:1]) == "h"
    lines = FORMATS["llama3"].results(results).splitlines()
    assert [json.loads(line) for line in lines] == [
        {"name": "get", "output": "h"},
        {"name": "ls", "output": "error: no"},
    ]


@pytest.mark.parametrize("form", ["hermes", "llama3"])
def test_instructions_hold_the_schemas(form: str) -> None:
    schemas = [tool.schema for tool in TOOLS.values()]
    text = instructions_with_tools("Be good.", schemas, form)
    assert text.startswith("Be good.\n\n")
    for schema in schemas:
        assert json.dumps(schema) in text.splitlines()
    assert instructions_with_tools("Be good.", (), form) == "Be good."


def test_plain_instructions_name_the_tools() -> None:
    text = plain_instructions("Be good.", TOOLS)
    assert "`get KEY`: Looks up." in text
    assert "  KEY: what to look up." in text
    assert "`write PATH CONTENT`: Writes." in text
    assert "`ls`" in text

"""Bytes from the other side are parsed strictly, or refused."""

from __future__ import annotations

import math
import socket
import stat
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunix_core.sandbox.inside import wire

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None))
    | st.binary()
)
HASHABLE = st.recursive(
    SCALARS | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
)
VALUES = st.recursive(
    HASHABLE, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(HASHABLE, inner, max_size=3) | st.sets(HASHABLE, max_size=3), max_leaves=15
)  # fmt: skip


def no_handle(value: Any) -> Any:
    raise AssertionError(value)


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a)))


@given(VALUES)
@settings(max_examples=40, deadline=None)
def test_plain_values_come_out_as_they_went_in(value: Any) -> None:
    assert same(wire.decode(wire.from_json(wire.to_json(wire.encode(value, no_handle))), no_handle), value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(list("ltszdifcbo")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(JSON)
@settings(max_examples=60, deadline=None)
def test_other_json_is_refused_or_gives_plain_values(value: Any) -> None:
    try:
        decoded = wire.decode(value, lambda handle: handle)
    except wire.MalformedMessage:
        return
    assert type(decoded) in (
        type(None),
        bool,
        int,
        float,
        str,
        bytes,
        complex,
        list,
        tuple,
        set,
        frozenset,
        dict,
        wire.Handle,
    )


@pytest.mark.parametrize("body", [b"", b"{", b"NaN", b"[1e999", b"\xff", b"[" * 200_000, b'"\\ud8'])
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(wire.MalformedMessage):
        wire.from_json(body)


@given(st.binary(max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_a_tree_or_refused(body: bytes) -> None:
    try:
        entries = list(wire.unpack_tree(body))
    except wire.MalformedMessage:
        return
    assert b"".join(wire.pack_entry(entry) for entry in entries) == body


def entry(path: bytes, kind: int = stat.S_IFREG) -> bytes:
    return wire._ENTRY.pack(wire._KINDS.index(kind), 0o644, len(path), 0) + path


@pytest.mark.parametrize("path", [b"/x", b"../x", b"a/../b", b"a/./b", b"a//b", b"", b"x\0", b"a/"])
def test_a_path_that_leads_out_is_refused(path: bytes) -> None:
    with pytest.raises(wire.MalformedMessage):
        list(wire.unpack_tree(entry(path)))


def test_a_path_twice_and_an_entry_cut_short_are_refused() -> None:
    assert [found.path for found in wire.unpack_tree(entry(b"a") + entry(b"b/c"))] == [b"a", b"b/c"]
    with pytest.raises(wire.MalformedMessage, match="twice"):
        list(wire.unpack_tree(entry(b"a") + entry(b"a")))
    for cut in range(1, len(entry(b"a"))):
        with pytest.raises(wire.MalformedMessage):
            list(wire.unpack_tree(entry(b"a")[:cut]))


@given(st.binary(max_size=40))
def test_only_a_whole_end_of_a_call_is_one(message: bytes) -> None:
    done = wire.Done(True, 9, 1500, 2**40)
    assert wire.Done.unpack(done.pack()) == done
    if len(message) != len(done.pack()) or message[0] > 1:
        with pytest.raises(wire.MalformedMessage):
            wire.Done.unpack(message)


def test_lengths_are_bounded_before_anything_is_read() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(wire.frame(b"12345") + b"\xff\xff\xff\xff")
        assert wire.read_frame(here, 5) == b"12345"
        with pytest.raises(wire.MalformedMessage, match="accepted up to 100"):
            wire.read_frame(here, 100)
    assert wire.collected_length(wire.collected_header(wire.COLLECTED, 5), 5) == 5
    assert wire.collected_length(wire.collected_header(wire.COLLECTED_FAILED, 0), 5) is None
    for header in (
        wire.collected_header(wire.COLLECTED, 6),
        wire.collected_header(wire.COLLECTED_FAILED, 1),
        b"\x07\0\0\0\0",
    ):
        with pytest.raises(wire.MalformedMessage):
            wire.collected_length(header, 5)


def test_a_request_survives_the_wire() -> None:
    request = wire.Request("checker", True, 1500, 2, 1 << 33, 16, 64, 1 << 34, 1 << 35, 1024)
    assert wire.Request.unpack(request.pack()) == request

"""Bytes between a pool and what runs inside: fixed-size messages, length-prefixed frames, trees of files, plain values.

Everything is parsed strictly and within bounds, since the other end may be hostile; nothing is pickled.
"""

from __future__ import annotations

import json
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

Role = Literal["run", "submission", "checker"]
ROLES: tuple[Role, ...] = ("run", "submission", "checker")

READY, KILL = b"R", b"K"
_REQUEST = struct.Struct("<BBQIQIIQQI")
_DONE = struct.Struct("<BiQQ")
_LENGTH = struct.Struct("<I")
_COLLECTED = struct.Struct("<BI")
_ENTRY = struct.Struct("<BHHI")

MAX_FRAME_BYTES = 1 << 20
"""Of one message between a submission and its tests."""
COLLECTED_FAILED, COLLECTED = 0, 1


class MalformedMessage(ValueError):
    """Bytes that are no message."""


class Request(NamedTuple):
    """Of one call: all that the zygote may know of it. What is in its memory is in every later call's."""

    role: Role
    collect: bool
    wall_ms: int
    cpu_seconds: int
    memory_bytes: int
    max_processes: int
    open_files: int
    file_bytes: int
    tmp_bytes: int
    tmp_files: int

    def pack(self) -> bytes:
        return _REQUEST.pack(ROLES.index(self.role), *self[1:])

    @classmethod
    def unpack(cls, message: bytes) -> Request:
        role, collect, *rest = _REQUEST.unpack(message)
        return cls(ROLES[role], bool(collect), *rest)


class Done(NamedTuple):
    """How a call ended: wait status of its first process, and whether the wall seconds were over."""

    timed_out: bool
    wait_status: int
    cpu_ms: int
    wall_ms: int

    def pack(self) -> bytes:
        return _DONE.pack(*self)

    @classmethod
    def unpack(cls, message: bytes) -> Done:
        """
        Raises:
            MalformedMessage: not of that form.
        """
        if len(message) != _DONE.size or message[0] > 1:
            raise MalformedMessage(f"{len(message)} bytes are no end of a call")
        timed_out, *rest = _DONE.unpack(message)
        return cls(bool(timed_out), *rest)


def frame(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def frame_length(header: bytes, max_bytes: int) -> int:
    """
    Raises:
        MalformedMessage: longer than accepted.
    """
    (length,) = _LENGTH.unpack(header)
    if length > max_bytes:
        raise MalformedMessage(f"a frame of {length} bytes, accepted up to {max_bytes}")
    return int(length)


def read_exactly(source: socket.socket, num_bytes: int) -> bytes:
    """
    Raises:
        EOFError: the other end closed before.
    """
    parts, missing = [], num_bytes
    while missing:
        part = source.recv(min(missing, 1 << 16))
        if not part:
            raise EOFError("the other end closed")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def read_frame(source: socket.socket, max_bytes: int = 0xFFFFFFFF) -> bytes:
    return read_exactly(source, frame_length(read_exactly(source, _LENGTH.size), max_bytes))


def collected_header(status: int, num_bytes: int) -> bytes:
    return _COLLECTED.pack(status, num_bytes)


def collected_length(header: bytes, max_bytes: int) -> int | None:
    """Bytes of the tree that follow; None where the files could not be collected.

    Raises:
        MalformedMessage: neither.
    """
    status, length = _COLLECTED.unpack(header)
    if status == COLLECTED_FAILED and length == 0:
        return None
    if status != COLLECTED or length > max_bytes:
        raise MalformedMessage(f"status {status} with {length} bytes, accepted up to {max_bytes}")
    return int(length)


COLLECTED_HEADER_BYTES = _COLLECTED.size
LENGTH_BYTES = _LENGTH.size


class Entry(NamedTuple):
    """A file, folder or symbolic link of a tree; parents come first."""

    kind: int
    """S_IFREG, S_IFDIR or S_IFLNK."""
    mode: int
    """Permission bits."""
    path: bytes
    data: bytes = b""
    """A file's bytes, a link's target."""


_KINDS = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
ENTRY_OVERHEAD_BYTES = _ENTRY.size


def pack_entry(entry: Entry) -> bytes:
    return b"".join(
        (
            _ENTRY.pack(_KINDS.index(entry.kind), entry.mode & 0o777, len(entry.path), len(entry.data)),
            entry.path,
            entry.data,
        )
    )


def check_path(path: bytes) -> None:
    """
    Raises:
        MalformedMessage: not a relative path below its root.
    """
    parts = path.split(b"/")
    if not path or b"\0" in path or any(part in (b"", b".", b"..") for part in parts):
        raise MalformedMessage(f"{path[:80]!r} is no relative path without dots")


def unpack_tree(body: bytes) -> Iterator[Entry]:
    """
    Raises:
        MalformedMessage: not what `pack_entry` writes, or a path twice.
    """
    position, seen = 0, set()
    while position < len(body):
        if len(body) - position < _ENTRY.size:
            raise MalformedMessage("a tree ends inside an entry")
        kind, mode, path_bytes, data_bytes = _ENTRY.unpack_from(body, position)
        position += _ENTRY.size
        if kind >= len(_KINDS) or mode > 0o777 or len(body) - position < path_bytes + data_bytes:
            raise MalformedMessage("an entry of a tree is no entry")
        path = body[position : position + path_bytes]
        check_path(path)
        if path in seen:
            raise MalformedMessage(f"{path[:80]!r} comes twice")
        seen.add(path)
        position += path_bytes
        yield Entry(_KINDS[kind], mode, path, body[position : position + data_bytes])
        position += data_bytes


# --- plain values ---------------------------------------------------------------------------------

_SMALL_INTEGER = 1 << 53
_CONTAINERS: dict[str, Any] = {"l": list, "t": tuple, "s": set, "z": frozenset}


class Handle(NamedTuple):
    """An object that stays in the process where it was made."""

    number: int
    type_name: str


def encode(value: Any, keep: Callable[[Any], Handle]) -> Any:
    """A value as JSON can carry it; of subclasses the plain value, other objects by the handle that `keep` gives."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, Handle):
        return ["o", int(value.number), str(value.type_name)]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__index__(value) if abs(int.__index__(value)) < _SMALL_INTEGER else ["i", hex(int.__index__(value))]
    if isinstance(value, float):
        return ["f", float.hex(float.__float__(value))]
    if isinstance(value, complex):
        return ["c", float.hex(value.real), float.hex(value.imag)]
    if isinstance(value, bytes | bytearray):
        return ["b", bytes(value).hex()]
    for tag, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            return [tag, *(encode(item, keep) for item in kind.__iter__(value))]
    if isinstance(value, dict):
        return ["d", *([encode(key, keep), encode(item, keep)] for key, item in dict.items(value))]
    handle = keep(value)
    return ["o", handle.number, handle.type_name]


def decode(value: Any, handle: Callable[[Handle], Any]) -> Any:
    """Objects of exact builtin types, and what `handle` makes of handles.

    Raises:
        MalformedMessage: not what `encode` gives.
    """
    if value is None or type(value) in (bool, str, int):
        return value
    if type(value) is not list or not value or type(value[0]) is not str:
        raise MalformedMessage("a value is of no known form")
    tag, rest = value[0], value[1:]
    try:
        if tag in _CONTAINERS:
            return _CONTAINERS[tag]([decode(item, handle) for item in rest])
        if tag == "d":
            return {decode(key, handle): decode(item, handle) for key, item in rest}
        if tag == "i":
            (digits,) = rest
            return int(digits, 16)
        if tag == "f":
            return float.fromhex(*rest)
        if tag == "c":
            real, imaginary = rest
            return complex(float.fromhex(real), float.fromhex(imaginary))
        if tag == "b":
            return bytes.fromhex(*rest)
        if tag == "o":
            number, name = rest
            if type(number) is int and type(name) is str:
                return handle(Handle(number, name[:80]))
    except (TypeError, ValueError, OverflowError) as error:
        raise MalformedMessage(f"a value of tag {tag!r} is malformed: {error}") from None
    raise MalformedMessage(f"a value of unknown tag {tag[:20]!r}")


def to_json(message: Any) -> bytes:
    """ASCII, so that strings that no encoding accepts pass too."""
    return json.dumps(message, separators=(",", ":")).encode("ascii")


def _refuse_constant(name: str) -> Any:
    raise MalformedMessage(f"{name} is no value")


def from_json(body: bytes) -> Any:
    """
    Raises:
        MalformedMessage: no JSON, or nested deeper than the interpreter allows.
    """
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"no JSON: {type(error).__name__}") from None

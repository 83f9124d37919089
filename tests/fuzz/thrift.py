"""Thrift's compact protocol as trees that can be changed and written again: what Parquet's footer and page headers are in."""

from __future__ import annotations

import dataclasses
from typing import Any

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
INTEGERS = (BYTE, I16, I32, I64)


@dataclasses.dataclass
class Field:
    """One field of a struct. A struct is a list of them, a list is `Items`."""

    number: int
    kind: int
    value: Any


@dataclasses.dataclass
class Items:
    """A list or set."""

    kind: int
    values: list[Any]


def get(struct: list[Field], *numbers: int) -> Any:
    """The value at a path of field numbers (of indices, where a list is passed)."""
    value: Any = struct
    for number in numbers:
        if isinstance(value, Items):
            value = value.values[number]
        else:
            (value,) = (field.value for field in value if field.number == number)
    return value


def put(struct: list[Field], number: int, value: Any) -> None:
    """Replace a field's value where there is such a field."""
    for field in struct:
        if field.number == number:
            field.value = value


def read_struct(data: bytes, at: int = 0) -> tuple[list[Field], int]:
    """The struct that begins at a position, and the position behind it."""
    fields, number = [], 0
    while (head := data[at]) != 0:
        at += 1
        kind = head & 15
        if head >> 4:
            number += head >> 4
        else:
            number, at = _zigzag(data, at)
        if kind in (TRUE, FALSE):
            value: Any = kind == TRUE
        else:
            value, at = _read(data, at, kind)
        fields.append(Field(number, TRUE if kind == FALSE else kind, value))
    return fields, at + 1


def write_struct(fields: list[Field]) -> bytes:
    """The inverse; what does not fit its type is cut to it."""
    out, last = bytearray(), 0
    for field in fields:
        kind = (TRUE if field.value else FALSE) if field.kind in (TRUE, FALSE) else field.kind
        delta = field.number - last
        out += bytes([delta << 4 | kind]) if 0 < delta < 16 else bytes([kind]) + _to_zigzag(field.number)
        last = field.number
        if field.kind not in (TRUE, FALSE):
            out += _write(field.value, kind)
    return bytes(out) + b"\0"


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _read(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind == BYTE:
        return data[at], at + 1
    if kind in INTEGERS:
        return _zigzag(data, at)
    if kind == DOUBLE:
        return data[at : at + 8], at + 8
    if kind == BINARY:
        size, at = _varint(data, at)
        return data[at : at + size], at + size
    if kind in (LIST, SET):
        size, element = data[at] >> 4, data[at] & 15
        at += 1
        if size == 15:
            size, at = _varint(data, at)
        values = []
        for _ in range(size):
            value, at = (data[at] == 1, at + 1) if element in (TRUE, FALSE) else _read(data, at, element)
            values.append(value)
        return Items(element, values), at
    if kind == STRUCT:
        return read_struct(data, at)
    raise ValueError(f"thrift type {kind}")


def to_varint(value: int) -> bytes:
    """Seven bits a byte."""
    value &= 2**64 - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _to_zigzag(value: int) -> bytes:
    return to_varint((value << 1) ^ (value >> 63))


def _write(value: Any, kind: int) -> bytes:
    if kind == BYTE:
        return bytes([value & 255])
    if kind in INTEGERS:
        return _to_zigzag(value)
    if kind == DOUBLE:
        return bytes(value)
    if kind == BINARY:
        return to_varint(len(value)) + value
    if kind in (LIST, SET):
        size = len(value.values)
        head = bytes([size << 4 | value.kind]) if size < 15 else bytes([0xF0 | value.kind]) + to_varint(size)
        if value.kind in (TRUE, FALSE):
            return head + bytes(1 if item else 2 for item in value.values)
        return head + b"".join(_write(item, value.kind) for item in value.values)
    return write_struct(value)

"""Thrift's compact protocol, as far as Parquet's footers and page headers use it, read without trust.

Parquet's decoder in C++ reads the same bytes, and must read the same from them. So all is refused that it would
read in another way: a field twice (the last counts there), numbers that do not fit their type (cut there), lists whose elements
are not of the type that the format has (read there as if they were).
"""

from __future__ import annotations

from typing import Any

from tunix_core.errors import CorruptObject

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)

_MAX_DEPTH = 12
_MAX_ITEMS = 10_000
"""In all lists together; what the decoder makes of one takes up to 700 bytes."""

Struct = dict[int, tuple[int, Any]]
"""Field number -> its type and value: int, bytes, a `Struct`, a list of them, or None (a truth value, a double)."""
Lists = dict[int, Any]
"""Which fields are lists: number -> (type of its elements, `Lists` of these). Of a struct's field: `Lists` of it."""


class ThriftReader:
    """Reads structs one after another, up to a bound on all of them."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._items = 0

    def struct(self, at: int, lists: Lists) -> tuple[Struct, int]:
        """The struct that begins at a position, and the position behind it.

        Raises:
            CorruptObject: it is none, or not one that every reader reads alike.
        """
        try:
            return self._struct(at, lists, 0)
        except IndexError:
            raise CorruptObject("thrift: breaks off") from None

    def _struct(self, at: int, lists: Lists, depth: int) -> tuple[Struct, int]:
        if depth > _MAX_DEPTH:
            raise CorruptObject("thrift: nested too deep")
        data = self._data
        fields: Struct = {}
        number = 0
        while head := data[at]:
            kind = head & 15
            if head < 16:
                zigzag, at = self._varint(at + 1)
                number = (zigzag >> 1) ^ -(zigzag & 1)
            else:
                number += head >> 4
                at += 1
            if number in fields or not 0 <= number < 2**15:
                raise CorruptObject(f"thrift: field {number} comes twice or has no number")
            value: Any = None
            if kind == BINARY or I16 <= kind <= I64:
                value = data[at]  # this loop is most of what reading a footer costs: short numbers without a call
                at += 1
                if value >= 128:
                    value, at = self._varint(at - 1)
                if kind != BINARY:
                    value = (value >> 1) ^ -(value & 1)
                else:
                    at += value
                    value = data[at - value : at]
            elif kind > FALSE:
                value, at = self._rare(at, kind, lists.get(number), depth)
            fields[number] = (kind, value)
        return fields, at + 1

    def _rare(self, at: int, kind: int, inside: Any, depth: int) -> tuple[Any, int]:
        if kind == STRUCT:
            return self._struct(at, inside if isinstance(inside, dict) else {}, depth + 1)
        if kind in (BYTE, DOUBLE):
            return None, at + (1 if kind == BYTE else 8)
        if kind == LIST and isinstance(inside, tuple):
            return self._list(at, inside[0], inside[1], depth)
        raise CorruptObject(f"thrift: type {kind}, which the format does not have there")

    def _list(self, at: int, element: int, inside: Lists, depth: int) -> tuple[list[Any], int]:
        """Structs or texts; numbers, of which nobody asks, are passed over."""
        head = self._data[at]
        size, at = head >> 4, at + 1
        if size == 15:
            size, at = self._varint(at)
        self._items += size
        if head & 15 != element or self._items > _MAX_ITEMS:
            raise CorruptObject(f"thrift: a list of {size} of type {head & 15}, accepted type {element}, few")
        values: list[Any] = []
        for _ in range(size):
            if element == STRUCT:
                struct, at = self._struct(at, inside, depth + 1)
                values.append(struct)
                continue
            number, at = self._varint(at)
            if element == BINARY:
                values.append(self._data[at : at + number])
                at += number
        if at > len(self._data):
            raise CorruptObject("thrift: breaks off")
        return values, at

    def _varint(self, at: int) -> tuple[int, int]:
        value = self._data[at]
        at += 1
        if value < 128:
            return value, at
        value &= 127
        for shift in range(7, 70, 7):
            byte = self._data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                break
        if value >= 2**64 or byte > 127:
            raise CorruptObject("thrift: a number of more than 64 bits")
        return value, at


def count(struct: Struct, number: int, kind: int = I64) -> int:
    """A field that is there, of that type and not negative. Raises CorruptObject."""
    found, value = struct.get(number, (0, None))
    if found != kind or not 0 <= value < (2**31 if kind == I32 else 2**63):
        raise CorruptObject(f"thrift: field {number} is no count ({value!r})")
    return int(value)


def text(struct: Struct, number: int) -> str:
    """A field of bytes as text; empty where there is none."""
    kind, value = struct.get(number, (0, None))
    return bytes(value).decode(errors="replace") if kind == BINARY else ""

"""Parquet page headers, read without trust: what a page says of itself before anything is unpacked."""

from __future__ import annotations

from typing import NamedTuple

from tunix_core.errors import CorruptObject

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_MAX_DEPTH = 4

DATA, DICTIONARY, DATA_V2 = 0, 2, 3
_HEADER_OF = {DATA: 5, DICTIONARY: 7, DATA_V2: 8}
_ENCODING_OF = {DATA: 2, DICTIONARY: 2, DATA_V2: 4}


class PageHeader(NamedTuple):
    """Sizes in bytes; `num_values` counts nulls and empty lists too."""

    kind: int
    num_unpacked_bytes: int
    num_packed_bytes: int
    num_values: int
    encoding: int


def read_page_header(data: memoryview, at: int) -> tuple[PageHeader, int]:
    """The header that begins at a position, and the position behind it.

    Parquet's own reader takes the last of a field that comes twice, and cuts numbers to 32 bits: both are refused
    here, so that it cannot read anything else than what was judged.

    Raises:
        CorruptObject: it is none, or of a page that holds no values.
    """
    try:
        fields, at = _read_struct(data, at, 0)
    except IndexError:
        raise CorruptObject("page header: breaks off") from None
    kind = _number(fields, 1)
    if kind not in _HEADER_OF:
        raise CorruptObject(f"page header: received page type {kind}, accepted data and dictionary pages")
    own = fields.get(_HEADER_OF[kind])
    if not isinstance(own, dict):
        raise CorruptObject("page header: says nothing of its values")
    return PageHeader(
        kind, _number(fields, 2), _number(fields, 3), _number(own, 1), _number(own, _ENCODING_OF[kind])
    ), at


def _number(fields: dict[int, object], number: int) -> int:
    value = fields.get(number)
    if not isinstance(value, int) or not 0 <= value < 2**31:
        raise CorruptObject(f"page header: field {number} is no count ({value!r})")
    return value


def _read_struct(data: memoryview, at: int, depth: int) -> tuple[dict[int, object], int]:
    """Thrift's compact protocol. Texts and lists are passed over: their field has None."""
    if depth > _MAX_DEPTH:
        raise CorruptObject("page header: nested too deep")
    fields: dict[int, object] = {}
    number = 0
    while head := data[at]:
        at += 1
        kind = head & 15
        if head < 16:
            zigzag, at = _read_varint(data, at)
            number = (zigzag >> 1) ^ -(zigzag & 1)
        else:
            number += head >> 4
        if number in fields:
            raise CorruptObject(f"page header: field {number} comes twice")
        fields[number], at = (None, at) if kind in (_TRUE, _FALSE) else _read_value(data, at, kind, depth)
    return fields, at + 1


def _read_value(data: memoryview, at: int, kind: int, depth: int) -> tuple[object, int]:
    if kind in (_I16, _I32, _I64):
        value, at = _read_varint(data, at)
        return (value >> 1) ^ -(value & 1), at
    if kind == _BINARY:
        size, at = _read_varint(data, at)
        return None, at + size
    if kind == _STRUCT:
        return _read_struct(data, at, depth + 1)
    if kind in (_BYTE, _DOUBLE):
        return None, at + (1 if kind == _BYTE else 8)
    raise CorruptObject(f"page header: type {kind}, which no page header has")


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = data[at]
    at += 1
    if value < 128:
        return value, at
    value &= 127
    for shift in range(7, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise CorruptObject("page header: a number of more than ten bytes")

"""What a Parquet file says of itself: its footer and page headers, read before anything is unpacked."""

from __future__ import annotations

from typing import NamedTuple

from tunix_core.errors import CorruptObject
from tunix_core.storage.thrift import BINARY, I32, I64, LIST, STRUCT, Lists, Struct, ThriftReader, count, text

_SIZES: Lists = {2: (I64, {}), 3: (I64, {})}
_COLUMN: Lists = {2: (I32, {}), 3: (BINARY, {}), 8: (STRUCT, {}), 13: (STRUCT, {}), 16: _SIZES}
_ROW_GROUP: Lists = {1: (STRUCT, {3: _COLUMN}), 4: (STRUCT, {})}
_FOOTER: Lists = {2: (STRUCT, {}), 4: (STRUCT, _ROW_GROUP), 5: (STRUCT, {}), 7: (STRUCT, {})}
"""Where the format has lists, by field numbers, and of what."""

_TYPES = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
_CODECS = ("uncompressed", "snappy", "gzip", "lzo", "brotli", "lz4", "zstd", "lz4_raw")

DATA, DICTIONARY, DATA_V2 = 0, 2, 3
_HEADER_OF = {DATA: 5, DICTIONARY: 7, DATA_V2: 8}
_ENCODING_OF = {DATA: 2, DICTIONARY: 2, DATA_V2: 4}


class ColumnChunk(NamedTuple):
    """One column of one row group."""

    path: str
    """Names joined by dots."""
    kind: str
    codec: str
    num_values: int
    """Nulls and empty lists included."""
    start: int
    """Where its pages begin in the file …"""
    end: int
    """… and end."""


class Footer(NamedTuple):
    """Of a file."""

    num_rows: int
    group_rows: list[int]
    """Of each row group."""
    columns: list[ColumnChunk]
    """Of all row groups."""
    texts: dict[str, str]
    """Its key-value metadata."""


class PageHeader(NamedTuple):
    """Sizes in bytes; `num_values` counts nulls and empty lists too."""

    kind: int
    num_unpacked_bytes: int
    num_packed_bytes: int
    num_values: int
    encoding: int


def read_footer(data: memoryview) -> Footer:
    """Raises CorruptObject when these bytes are none, or more than one."""
    footer, end = ThriftReader(data).struct(0, _FOOTER)
    if end != len(data):
        raise CorruptObject("footer: bytes behind it")
    if {8, 9} & footer.keys():
        raise CorruptObject("footer: encrypted")
    groups = _structs(footer, 4)
    return Footer(
        count(footer, 3),
        [count(group, 3) for group in groups],
        [_column(chunk) for group in groups for chunk in _structs(group, 1)],
        {text(entry, 1): text(entry, 2) for entry in _structs(footer, 5)},
    )


def _structs(struct: Struct, number: int) -> list[Struct]:
    kind, value = struct.get(number, (LIST, []))
    if kind != LIST:
        raise CorruptObject(f"footer: field {number} is no list")
    found: list[Struct] = value
    return found


def _column(chunk: Struct) -> ColumnChunk:
    kind, found = chunk.get(3, (0, None))
    if kind != STRUCT:
        raise CorruptObject("footer: a column without a description")
    path_kind, path = found.get(3, (0, None))
    if path_kind != LIST:
        raise CorruptObject("footer: a column without a name")
    start = count(found, 9)
    if 11 in found:
        start = min(start, count(found, 11) or start)
    return ColumnChunk(
        ".".join(bytes(part).decode(errors="replace") for part in path),
        _name(_TYPES, count(found, 1, I32)),
        _name(_CODECS, count(found, 4, I32)),
        count(found, 5),
        start,
        start + count(found, 7),
    )


def _name(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else f"number {number}"


def read_page_header(data: memoryview, at: int) -> tuple[PageHeader, int]:
    """The header that begins at a position, and the position behind it.

    Raises:
        CorruptObject: it is none, or of a page that holds no values.
    """
    fields, at = ThriftReader(data).struct(at, {})
    kind = count(fields, 1, I32)
    if kind not in _HEADER_OF:
        raise CorruptObject(f"page header: received page type {kind}, accepted data and dictionary pages")
    own_kind, own = fields.get(_HEADER_OF[kind], (0, None))
    if own_kind != STRUCT:
        raise CorruptObject("page header: says nothing of its values")
    num_values, encoding = count(own, 1, I32), count(own, _ENCODING_OF[kind], I32)
    return PageHeader(kind, count(fields, 2, I32), count(fields, 3, I32), num_values, encoding), at

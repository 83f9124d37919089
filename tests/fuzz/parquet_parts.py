"""A Parquet file taken apart into footer and pages, to be put together again with something changed."""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from typing import Any

import pyarrow as pa

from tests.fuzz.thrift import BINARY, Field, Items, get, put, read_struct, write_struct

_MAGIC = b"PAR1"
_MARK = b"TUNIXSHA"
_ZSTD = pa.Codec("zstd")


@dataclasses.dataclass
class Page:
    """One page; `body` is what its bytes decompress to."""

    header: list[Field]
    body: bytes
    packed: bytes | None = None
    """The compressed bytes where they are not to follow from `body`."""
    lies: bool = False
    """The header's sizes and checksum stay as they are."""

    def to_bytes(self) -> bytes:
        packed = _ZSTD.compress(self.body).to_pybytes() if self.packed is None else self.packed
        if not self.lies:
            put(self.header, 2, len(self.body))
            put(self.header, 3, len(packed))
            put(self.header, 4, _signed(zlib.crc32(packed)))
        return write_struct(self.header) + packed


def _signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


@dataclasses.dataclass
class Parts:
    """Pages by column chunk, in the order of the footer, which is brought up to date when bytes are made."""

    footer: list[Field]
    chunks: list[list[Page]]
    has_digest: bool
    keeps_offsets: bool = False
    """The footer's offsets and sizes stay as they are."""

    @classmethod
    def of(cls, data: bytes) -> Parts:
        """Take a sound file of one row group apart."""
        size = int.from_bytes(data[-8:-4], "little")
        footer, _ = read_struct(data[-8 - size : -8])
        pages = [_pages(data, column) for column in column_metadata(footer)]
        return cls(footer, pages, has_digest=_MARK in data[-48 - size : -8 - size])

    def column(self, path: str) -> int:
        """The number of the chunk with this path."""
        paths = [".".join(p.decode() for p in get(c, 3).values) for c in column_metadata(self.footer)]
        return paths.index(path)

    def to_bytes(self) -> bytes:
        return self.finish(self.body())

    def finish(self, body: bytes) -> bytes:
        """A file of this body and the footer as it is now."""
        file = with_footer(body, write_struct(self.footer))
        return with_digest(file, len(body)) if self.has_digest else file

    def body(self) -> bytes:
        """The pages; brings the footer up to date."""
        out = bytearray(_MAGIC)
        for column, pages in zip(column_metadata(self.footer), self.chunks, strict=False):
            begin, dictionary, first, unpacked = len(out), None, None, 0
            for page in pages:
                if get(page.header, 1) == 2:
                    dictionary = len(out)
                elif first is None:
                    first = len(out)
                written = page.to_bytes()
                unpacked += len(write_struct(page.header)) + get(page.header, 2)
                out += written
            if not self.keeps_offsets:
                for number, value in ((6, unpacked), (7, len(out) - begin), (9, first), (11, dictionary)):
                    if value is not None:
                        put(column, number, value)
        return bytes(out)


def with_digest(file: bytes, footer_start: int) -> bytes:
    """As the writer does, whatever the file is: somebody who wants to be read knows how."""
    return file[:footer_start] + _MARK + hashlib.sha256(file).digest() + file[footer_start:]


def with_footer(body: bytes, footer: bytes) -> bytes:
    """A file of these bytes."""
    return body + footer + len(footer).to_bytes(4, "little") + _MAGIC


def column_metadata(footer: list[Field]) -> list[list[Field]]:
    """Of all row groups."""
    return [get(column, 3) for group in get(footer, 4).values for column in get(group, 1).values]


def set_text(footer: list[Field], key: str, value: str) -> None:
    """Of the file's key-value metadata."""
    for entry in get(footer, 5).values:
        if get(entry, 1) == key.encode():
            put(entry, 2, value.encode())
            return
    get(footer, 5).values.append([Field(1, BINARY, key.encode()), Field(2, BINARY, value.encode())])


def _pages(data: bytes, column: list[Field]) -> list[Page]:
    offsets = [field.value for field in column if field.number in (9, 11)]
    at, end = min(offsets), min(offsets) + get(column, 7)
    pages = []
    while at < end:
        header, at = read_struct(data, at)
        packed = data[at : at + get(header, 3)]
        at += len(packed)
        body = _ZSTD.decompress(packed, get(header, 2)).to_pybytes() if packed else b""
        pages.append(Page(header, body))
    return pages


def every_struct(value: Any) -> list[list[Field]]:
    """All structs inside one, itself included."""
    if isinstance(value, Items):
        return [found for item in value.values for found in every_struct(item)]
    if isinstance(value, list):
        return [value, *(found for field in value for found in every_struct(field.value))]
    return []

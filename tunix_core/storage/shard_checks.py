"""What is asked of a shard's bytes before anything of it is unpacked: that they are whole, and what they would take.

Whole: between pages and footer, where no Parquet reader looks, lies a SHA-256 of all other bytes. A truncated, mixed or
flipped file is refused by it, and its pages and footer are never given to Parquet's decoder. It says nothing about
who wrote the file.

Bounded: a decoder takes what footer and page headers ask for. So both are judged first: the counts in the headers are
those of the footer, each page lies within its column, and what all of it decodes to is within `ShardLimits`. Parquet's
decoder holds itself to the headers (an unpacked page has the size that its header says, or is an error). Two encodings
let few bytes stand for many: a run of one dictionary entry, so entries are taken to be as long as the longest;
and front coding of texts (DELTA_BYTE_ARRAY), which is refused.

Footer and page headers are read here and not through pyarrow's objects for them: 2026-12-01, `make fuzz` found footers at which
`RowGroupMetaData.column` ends the process (a C++ exception that Cython does not expect). What its readers do with the same
bytes are errors; neither a crash of theirs nor memory over the bound has been found.

Rejected: decoding in a process of its own under a limit of memory. It would hold whatever the decoder does, but costs a copy
of every shard, or a second path for suspicious ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import NamedTuple

import pyarrow as pa

from tunix_core.errors import CorruptObject
from tunix_core.storage.parquet_headers import (
    DICTIONARY,
    ColumnChunk,
    Footer,
    PageHeader,
    read_footer,
    read_page_header,
)
from tunix_core.validation import require_range

_MAGIC = b"PAR1"
_END_BYTES = 8
_MARK = b"TUNIXSHA"
_DIGEST_BYTES = len(_MARK) + 32

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 64}
"""Bytes per decoded value; of texts what a Python string takes beside its characters."""
_LEVEL_BYTES = 8
"""Per entry of a list, while its column is decoded."""
_ENCODINGS = {0, 2, 3, 5, 6, 8, 9}
"""PLAIN, PLAIN_DICTIONARY, RLE, DELTA_BINARY_PACKED, DELTA_LENGTH_BYTE_ARRAY, RLE_DICTIONARY, BYTE_STREAM_SPLIT."""
_MIN_ENTRY_BYTES = 4
"""Of a dictionary's entry: a number, or the length of a text."""
_SMALL_SHARE = 64
"""Of the limit: a bound below it is not worth looking closer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardLimits:
    """What a reader takes in at most of one shard."""

    max_footer_bytes: int = 2**18
    """Parquet makes up to 700 times as many of them in memory. A shard's has about 8 KiB."""
    max_rows: int = 2**16
    max_decoded_bytes: int = 2**29
    """Of all values, texts as Python strings, and of what the largest column takes beside them while it is decoded."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            require_range(f"shard_limits.{field.name}", getattr(self, field.name), 1, 2**31 - 1)


LIMITS = ShardLimits()


def with_digest(data: bytes) -> bytes:
    """A Parquet file with the SHA-256 of its bytes put before its footer."""
    at = _footer_start(data, len(data))
    return b"".join((data[:at], _MARK, hashlib.sha256(data).digest(), data[at:]))


class FileSummary(NamedTuple):
    """What a file says of itself."""

    footer: Footer
    has_digest: bool
    """It vouches for the file; files of schema version 1 have none."""


def summarize(data: bytes, limits: ShardLimits) -> FileSummary:
    """Read the footer of a file whose digest, if it has one, is right.

    Raises:
        CorruptObject: no Parquet file, or other bytes than were written.
    """
    at = _footer_start(data, limits.max_footer_bytes)
    begin = at - _DIGEST_BYTES
    view = memoryview(data)
    has_digest = begin >= len(_MAGIC) and view[begin : begin + len(_MARK)] == _MARK
    if has_digest:
        digest = hashlib.sha256(view[:begin])
        digest.update(view[at:])
        if digest.digest() != view[begin + len(_MARK) : at]:
            raise CorruptObject("sha256: the bytes are not those that were written")
    return FileSummary(read_footer(view[at : len(data) - _END_BYTES]), has_digest)


def _footer_start(data: bytes, max_bytes: int) -> int:
    if len(data) < len(_MAGIC) + _END_BYTES or data[:4] != _MAGIC or data[-4:] != _MAGIC:
        raise CorruptObject(f"no Parquet file: {len(data)} bytes, not between the marks {_MAGIC.decode()}")
    size = int.from_bytes(data[-8:-4], "little")
    start = len(data) - _END_BYTES - size
    if start < len(_MAGIC):
        raise CorruptObject(f"no Parquet file: a footer of {size} bytes in a file of {len(data)}")
    if size > max_bytes:
        raise CorruptObject(f"footer: received {size} bytes, accepted at most {max_bytes}")
    return start


def check_size(data: bytes, footer: Footer, columns: set[str], limits: ShardLimits) -> None:
    """Refuse a file that would decode to more than the limits; no page is unpacked but a dictionary of known size.

    Args:
        columns: top-level names of those that will be decoded.

    Raises:
        CorruptObject: too many rows or bytes, or headers that contradict the footer.
    """
    if footer.num_rows > limits.max_rows:
        raise CorruptObject(f"rows: received {footer.num_rows}, accepted at most {limits.max_rows}")
    if sum(footer.group_rows) != footer.num_rows:
        raise CorruptObject(f"rows: received {sum(footer.group_rows)} in row groups, promised {footer.num_rows}")
    body = memoryview(data)[: _footer_start(data, limits.max_footer_bytes)]
    kept = most = 0
    for column in footer.columns:
        if column.path.split(".", 1)[0] not in columns:
            continue
        try:
            of_values, meanwhile = _decoded_bytes(body, column, limits)
        except CorruptObject as error:
            raise CorruptObject(f"column {column.path}: {error}") from None
        kept, most = kept + of_values, max(most, meanwhile)
        if kept + most > limits.max_decoded_bytes:
            raise CorruptObject(f"decoded size: {kept + most} bytes, accepted at most {limits.max_decoded_bytes}")


def _decoded_bytes(body: memoryview, column: ColumnChunk, limits: ShardLimits) -> tuple[int, int]:
    """What a column chunk's values take, and what else is needed until they are decoded."""
    kind = column.kind
    if kind not in _WIDTHS:
        raise CorruptObject(f"received {kind}, accepted {', '.join(_WIDTHS)}")
    pages = _pages(body, column)
    num_values = sum(page.num_values for page, _ in pages if page.kind != DICTIONARY)
    if num_values != column.num_values:
        raise CorruptObject(f"values: received {num_values} in pages, promised {column.num_values}")
    meanwhile = max((page.num_unpacked_bytes for page, _ in pages), default=0) + num_values * _LEVEL_BYTES
    kept = num_values * _WIDTHS[kind]
    if kind == "BYTE_ARRAY" and max(kept, meanwhile) <= limits.max_decoded_bytes:
        kept += sum(page.num_unpacked_bytes for page, _ in pages)
        if pages and pages[0][0].kind == DICTIONARY:
            texts = num_values * pages[0][0].num_unpacked_bytes
            if texts > limits.max_decoded_bytes // _SMALL_SHARE:
                texts = num_values * _longest_entry(body, column, *pages[0])
            kept += texts
    return kept, meanwhile


def _pages(body: memoryview, column: ColumnChunk) -> list[tuple[PageHeader, int]]:
    """Headers of a column chunk, each with the position of its page's bytes."""
    if not column.num_values:  # an empty column has no page that is read, and offsets that mean nothing
        return []
    at, end = column.start, column.end
    if not len(_MAGIC) <= at <= end <= len(body):
        raise CorruptObject(f"received bytes {at} to {end}, accepted {len(_MAGIC)} to {len(body)}")
    pages: list[tuple[PageHeader, int]] = []
    while at < end:
        page, at = read_page_header(body, at)
        if page.encoding not in _ENCODINGS:
            raise CorruptObject(f"page encoding: received {page.encoding}, accepted {sorted(_ENCODINGS)}")
        if page.kind == DICTIONARY and pages:
            raise CorruptObject("a dictionary behind other pages")
        if page.kind == DICTIONARY and page.num_values * _MIN_ENTRY_BYTES > page.num_unpacked_bytes:
            raise CorruptObject(f"a dictionary of {page.num_values} entries in {page.num_unpacked_bytes} bytes")
        pages.append((page, at))
        at += page.num_packed_bytes
    if at != end:
        raise CorruptObject("a page runs over the end of its column")
    return pages


def _longest_entry(body: memoryview, column: ColumnChunk, page: PageHeader, at: int) -> int:
    """Bytes of a dictionary's longest text."""
    plain = body[at : at + page.num_packed_bytes]
    if column.codec != "uncompressed":
        try:
            plain = memoryview(pa.decompress(plain, page.num_unpacked_bytes, column.codec))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise CorruptObject(f"dictionary: {error}"[:200]) from error
    longest = position = 0
    while position + 4 <= len(plain):
        size = int.from_bytes(plain[position : position + 4], "little")
        longest = max(longest, size)
        position += 4 + size
    return longest

"""Ways in which a shard can be broken, each a function of a generator and a sound shard.

Those that change pages or the footer write sizes and checksums anew, so that what they changed is reached.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.fuzz.hostile_rows import hostile_rows
from tests.fuzz.parquet_parts import Page, Parts, column_metadata, every_struct, set_text, with_digest, with_footer
from tests.fuzz.thrift import BINARY, BYTE, INTEGERS, STRUCT, Field, Items, get, put, to_varint, write_struct

Mutation = Callable[[random.Random, bytes], bytes]

EXTREMES = (-(2**63), -(2**31), -1, 0, 1, 2, 127, 128, 2**15, 2**24, 2**30, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1)


def truncated(rng: random.Random, data: bytes) -> bytes:
    """At a twentieth, or anywhere."""
    if rng.random() < 0.5:
        return data[: len(data) * rng.randrange(20) // 20]
    return data[: rng.randrange(len(data))]


def bits_flipped(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 50))):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def bits_flipped_under_a_digest(rng: random.Random, data: bytes) -> bytes:
    """Of the footer more often than of pages, which are most of a file."""
    parts = Parts.of(data)
    body, footer = parts.body(), write_struct(parts.footer)
    if rng.random() < 0.7:
        return with_digest(with_footer(body, bits_flipped(rng, footer)), len(body))
    return with_digest(with_footer(bits_flipped(rng, body), footer), len(body))


def spliced(rng: random.Random, data: bytes) -> bytes:
    """A run of bytes doubled, moved, zeroed or left out."""
    start, size = rng.randrange(len(data)), rng.choice((1, 8, 64, 1000, 4096))
    piece = data[start : start + size]
    where = rng.randrange(len(data))
    kind = rng.randrange(4)
    if kind == 0:
        return data[:where] + piece + data[where:]
    if kind == 1:
        return data[:where] + piece + data[where + size :]
    if kind == 2:
        return data[:start] + bytes(len(piece)) + data[start + size :]
    return data[:start] + data[start + size :]


def _change_struct(rng: random.Random, root: list[Field]) -> None:
    struct = rng.choice([found for found in every_struct(root) if found])
    at = rng.randrange(len(struct))
    field, kind = struct[at], rng.randrange(8)
    if kind == 0:
        del struct[at]
    elif kind == 1:
        struct.insert(at, Field(field.number, field.kind, field.value))
    elif kind == 2:
        field.number = rng.choice((0, 1, field.number + 1, 99, 32767))
    else:
        field.value = _changed_value(rng, field.kind, field.value)


def _changed_value(rng: random.Random, kind: int, value: Any) -> Any:
    if kind in INTEGERS and kind != BYTE:
        return rng.choice((*EXTREMES, value + 1, value - 1, value * 2, -value, value ^ (1 << rng.randrange(31))))
    if kind == BINARY:
        return rng.choice((b"", value * 2, value[:-1], b"\xff\xfe" + value, b"../" * 40 + value, bytes(100_000)))
    if isinstance(value, Items) and value.values:
        values = list(value.values)
        change = rng.randrange(5)
        at = rng.randrange(len(values))
        if change == 0:
            del values[at]
        elif change == 1:
            values.insert(at, values[rng.randrange(len(values))])
        elif change == 2:
            values = values * rng.choice((2, 50))
        elif change == 3:
            values[at] = _changed_value(rng, value.kind, values[at])
        else:
            rng.shuffle(values)
        return Items(value.kind, values)
    if kind == STRUCT:
        _change_struct(rng, value) if value else None
        return value
    return not value if isinstance(value, bool) else value


def footer_changed(rng: random.Random, data: bytes) -> bytes:
    parts = Parts.of(data)
    body = parts.body()
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change_struct(rng, parts.footer)
    return parts.finish(body)


def counts_lied_about(rng: random.Random, data: bytes) -> bytes:
    """Counts and sizes in the footer that contradict the pages."""
    parts = Parts.of(data)
    body = parts.body()
    for _ in range(rng.choice((1, 2))):
        number = rng.choice((5, 6, 7, 9, 11))
        column = rng.choice(column_metadata(parts.footer))
        put(column, number, rng.choice((*EXTREMES, rng.randrange(len(data)))))
    if rng.random() < 0.3:
        rows = rng.choice((*EXTREMES, rng.randrange(100)))
        put(parts.footer, 3, rows)
        put(get(parts.footer, 4, 0), 3, rows)
    return parts.finish(body)


def _page(rng: random.Random, parts: Parts) -> Page:
    return rng.choice([page for pages in parts.chunks for page in pages])


def page_header_changed(rng: random.Random, data: bytes) -> bytes:
    parts = Parts.of(data)
    parts.keeps_offsets = rng.random() < 0.3
    for _ in range(rng.choice((1, 1, 2))):
        page = _page(rng, parts)
        page.lies = rng.random() < 0.5
        _change_struct(rng, page.header)
        if page.lies and rng.random() < 0.3:
            page.header = [field for field in page.header if field.number != 4]  # no checksum
    return _written(parts, data)


def _written(parts: Parts, fallback: bytes) -> bytes:
    try:
        return parts.to_bytes()
    except (ValueError, TypeError):  # a field that the bookkeeping itself needs is gone
        return fallback


def page_body_changed(rng: random.Random, data: bytes) -> bytes:
    """Levels, dictionary indices, lengths and values; compressed anew, under a checksum that holds."""
    parts = Parts.of(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        page = _page(rng, parts)
        body = bytearray(page.body) or bytearray(1)
        kind = rng.randrange(6)
        where = rng.randrange(min(len(body), rng.choice((8, 64, len(body)))))
        if kind == 0:
            body[where] = rng.choice((0, 1, 2, 3, 0x7F, 0x80, 0xFE, 0xFF, rng.randrange(256)))
        elif kind == 1:
            body[where : where + 4] = rng.choice(EXTREMES[2:11]).to_bytes(8, "little", signed=True)[:4]
        elif kind == 2:
            body[where:where] = rng.randbytes(rng.choice((1, 4, 100)))
        elif kind == 3:
            del body[where : where + rng.choice((1, 4, 100))]
        elif kind == 4:
            body[where : where + 5] = b"\xff\xff\xff\xff\x0f"  # a varint of 2^32 - 1: a run or a length
        else:
            body = bytearray(rng.randbytes(len(body)))
        page.body = bytes(body)
    return _written(parts, data)


def pages_rearranged(rng: random.Random, data: bytes) -> bytes:
    parts = Parts.of(data)
    chunk = rng.choice(parts.chunks)
    kind = rng.randrange(5)
    if kind == 0:
        chunk.append(chunk[-1])
    elif kind == 1:
        chunk.insert(0, rng.choice(rng.choice(parts.chunks)))
    elif kind == 2:
        chunk.reverse()
    elif kind == 3:
        other = rng.choice(parts.chunks)
        chunk[:], other[:] = other[:], chunk[:]
    else:
        chunk[-1].body, chunk[0].body = chunk[0].body, _page(rng, parts).body
    return _written(parts, data)


# --- bombs ------------------------------------------------------------------------------------


def bomb(rng: random.Random, data: bytes) -> bytes:
    """Few bytes that unpack to many, up to more than the fuzzer allows; the footer may tell of it, or not."""
    parts = Parts.of(data)
    parts.keeps_offsets = rng.random() < 0.3
    how = rng.choice((zeros, claimed_size, run_of_values, repeated_text, long_row))
    return how(rng, parts, rng.random() < 0.5, int(2 ** rng.uniform(16, 27)))


def zeros(rng: random.Random, parts: Parts, _tell: bool, size: int) -> bytes:
    """A page of them."""
    _page(rng, parts).body = bytes(size)
    return parts.to_bytes()


def claimed_size(rng: random.Random, parts: Parts, _tell: bool, _size: int) -> bytes:
    """A header that claims 2 GiB."""
    page = _page(rng, parts)
    page.packed = page.to_bytes()[len(write_struct(page.header)) :]
    page.lies = True
    put(page.header, 2, 2**31 - 1)
    return parts.to_bytes()


def _run(value: bytes, count: int) -> bytes:
    """An RLE run."""
    return to_varint(count << 1) + value


def run_of_values(rng: random.Random, parts: Parts, tell: bool, size: int) -> bytes:
    """One dictionary index over and over."""
    column = parts.column(rng.choice(("group_id", "finish_reason", "split")))
    page = parts.chunks[column][-1]
    page.body = b"\x01" + _run(b"\x00", size)
    put(get(page.header, 5), 1, size)
    put(column_metadata(parts.footer)[column], 5, size)
    if tell:
        put(parts.footer, 3, size)
        put(get(parts.footer, 4, 0), 3, size)
    return parts.to_bytes()


def repeated_text(rng: random.Random, parts: Parts, _tell: bool, size: int) -> bytes:
    """A long text in a dictionary, named by each of many rows or entries."""
    path = rng.choice(("group_id", "environment", "turns.list.element.tool_name"))
    dictionary, page = parts.chunks[parts.column(path)]
    text = bytes(size // 8)
    dictionary.body = len(text).to_bytes(4, "little") + text
    put(get(dictionary.header, 7), 1, 1)
    levels = 0
    for _ in range(2 if "." in path else 0):
        levels += 4 + int.from_bytes(page.body[levels : levels + 4], "little")
    page.body = page.body[:levels] + b"\x01" + _run(b"\x00", get(page.header, 5, 1))
    return parts.to_bytes()


def long_row(rng: random.Random, parts: Parts, tell: bool, size: int) -> bytes:
    """One row with all the entries: levels and values in runs."""
    path = rng.choice(("token_policy_version.list.element", "loss_mask.list.element"))
    column = parts.column(path)
    page = parts.chunks[column][-1]
    num_rows = get(parts.footer, 3)
    count = num_rows + size
    levels = (_run(b"\x00", num_rows) + _run(b"\x01", size), _run(b"\x01", count))
    values = b"\x01" + _run(b"\x00", count) if path.startswith("token") else bytes(count // 8 + 1)
    page.body = b"".join(len(level).to_bytes(4, "little") + level for level in levels) + values
    put(get(page.header, 5), 1, count)
    if tell:
        put(column_metadata(parts.footer)[column], 5, count)
    return parts.to_bytes()


def many_containers(rng: random.Random, data: bytes) -> bytes:
    """Lists in the footer that say they are long, or are long and of nothing."""
    parts = Parts.of(data)
    body = parts.body()
    holder, number = rng.choice(((parts.footer, 2), (parts.footer, 4), (parts.footer, 5), (get(parts.footer, 4, 0), 1)))
    empty: list[Any] = [[] for _ in range(rng.choice((5_000, 5_000, 15_000, 15_000, 100_000)))]
    put(holder, number, Items(STRUCT, [*get(holder, number).values, *empty]))
    return parts.finish(body)


def deep_schema(rng: random.Random, data: bytes) -> bytes:
    """Columns nested up to thousands of levels deep."""
    parts = Parts.of(data)
    body = parts.body()
    elements = get(parts.footer, 2).values
    depth = rng.choice((50, 200, 5_000))
    group = [Field(3, 5, rng.randrange(3)), Field(4, BINARY, b"g"), Field(5, 5, 1)]
    put(elements[0], 5, get(elements[0], 5) + 1)
    elements += [group] * depth
    elements.append([Field(1, 5, 1), Field(3, 5, 0), Field(4, BINARY, b"leaf")])
    return parts.finish(body)


def texts_changed(rng: random.Random, data: bytes) -> bytes:
    """The schema version and the other texts of the file."""
    parts = Parts.of(data)
    body = parts.body()
    key = rng.choice(("tunix.schema_version", "tunix.tombstone", "tunix.writer", "ARROW:schema"))
    value = rng.choice(("", "-1", "0", "3", "99999999999999999999", "true", "\x00", "../../x", "1.5", "é" * 10_000))
    set_text(parts.footer, key, value)
    return parts.finish(body)


def garbage(rng: random.Random, _data: bytes) -> bytes:
    noise = rng.randbytes(rng.choice((0, 3, 12, 200, 5000)))
    return rng.choice((noise, b"PAR1" + noise + b"PAR1", with_footer(b"PAR1", noise)))


def rows_hostile(rng: random.Random, _data: bytes) -> bytes:
    """A sound file whose rows are not, by another writer."""
    return hostile_rows(rng)


KINDS: dict[str, Mutation] = {
    function.__name__: function
    for function in (
        *(
            truncated,
            bits_flipped,
            bits_flipped_under_a_digest,
            spliced,
            garbage,
            footer_changed,
            counts_lied_about,
            page_header_changed,
        ),
        *(page_body_changed, pages_rearranged, bomb, many_containers, deep_schema, texts_changed, rows_hostile),
    )
}

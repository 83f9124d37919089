"""What is refused before anything of a shard is unpacked; `tests/fuzz` tries far more of it."""

from __future__ import annotations

import io
import random
from pathlib import Path

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import mutations
from tests.fuzz.parquet_parts import Parts, column_metadata, set_text
from tests.fuzz.thrift import INTEGERS, Field, Items, get, put, write_struct
from tests.support.trajectories import make_group, same_trajectory
from tunix_core.errors import CorruptObject
from tunix_core.storage import shards
from tunix_core.storage.parquet_headers import DATA, DICTIONARY, read_page_header
from tunix_core.storage.shard_checks import ShardLimits, with_digest
from tunix_core.types import SCHEMA_VERSION

OLDER = Path(__file__).parent / "data" / "schema-1.parquet"
SMALL = ShardLimits(max_decoded_bytes=2**20)


def shard() -> bytes:
    return shards.encode(make_group(0) + make_group(1))


@pytest.fixture
def no_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of Parquet's decoder fails the test."""

    def decoder(*_args: object, **_options: object) -> None:
        raise AssertionError("these bytes were given to the decoder")

    monkeypatch.setattr(pq, "ParquetFile", decoder)


@pytest.mark.usefixtures("no_decoder")
def test_a_truncated_shard_is_never_decoded() -> None:
    data = shard()
    for length in {*(len(data) * part // 20 for part in range(20)), len(data) - 1}:
        with pytest.raises(CorruptObject, match="no Parquet file"):
            shards.decode(data[:length])


@pytest.mark.usefixtures("no_decoder")
def test_a_shard_with_a_flipped_bit_is_never_decoded() -> None:
    """Wherever it is, but in the mark that says that there is a digest."""
    data, rng = shard(), random.Random(0)
    mark = data.index(b"TUNIXSHA")
    for position in [*rng.sample(range(4, mark), 60), *range(mark + 8, len(data) - 8, 53)]:
        flipped = data[:position] + bytes([data[position] ^ 1 << rng.randrange(8)]) + data[position + 1 :]
        with pytest.raises(CorruptObject, match="sha256: the bytes are not those that were written"):
            shards.decode(flipped)
    for position in (0, len(data) - 1, len(data) - 8, len(data) - 5):  # the ends, and how long the footer is
        flipped = data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
        with pytest.raises((CorruptObject, AssertionError)):
            shards.decode(flipped)


def test_a_shard_without_its_digest_is_refused() -> None:
    data = shard()
    mark = data.index(b"TUNIXSHA")
    for changed in (data[:mark] + data[mark + 40 :], data.replace(b"TUNIXSHA", b"TUNIXSHB")):
        with pytest.raises(CorruptObject, match="sha256: missing, which schema_version 2 has"):
            shards.decode(changed)


def test_other_readers_do_not_mind_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "shard.parquet"
    path.write_bytes(shard())
    assert b"TUNIXSHA" in path.read_bytes()
    ids = [trajectory.trajectory_id for trajectory in make_group(0) + make_group(1)]
    assert pq.read_table(path).column("trajectory_id").to_pylist() == ids
    assert duckdb.sql(f"select trajectory_id from '{path}'").fetchall() == [(name,) for name in ids]
    assert polars.read_parquet(path)["trajectory_id"].to_list() == ids


# --- versions of the schema -----------------------------------------------------------------------


def test_a_file_of_schema_version_1_still_reads() -> None:
    """As the release before digests wrote it."""
    rows = shards.decode(OLDER.read_bytes(), vocab_size=272)
    assert rows.metadata["schema_version"] == "1"
    assert rows.faults == {}
    for row, trajectory in enumerate(make_group(0) + make_group(1)):
        assert same_trajectory(rows.trajectory(row), trajectory)


def test_each_page_of_a_file_of_schema_version_1_has_a_checksum() -> None:
    data = OLDER.read_bytes()
    for column in column_metadata(Parts.of(data).footer):
        position = min(field.value for field in column if field.number in (9, 11)) + get(column, 7) - 1
        with pytest.raises(CorruptObject):
            shards.decode(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (str(SCHEMA_VERSION + 1), r"schema_version: received 3, accepted 1 to 2\. Upgrade this reader"),
        ("9" * 5000, "Upgrade this reader"),
        ("0", "schema_version: received 0"),
        ("-1", "no trajectory shard"),
        ("../../2", "no trajectory shard"),
        ("٢", "accepted 1 to 2"),
    ],
)
def test_other_versions_are_refused_by_name(version: str, reason: str) -> None:
    parts = Parts.of(shard())
    body = parts.body()
    set_text(parts.footer, "tunix.schema_version", version)
    for parts.has_digest in (True, False):
        with pytest.raises(CorruptObject, match=reason) as refused:
            shards.decode(parts.finish(body))
        assert len(str(refused.value)) <= 500


# --- sizes ----------------------------------------------------------------------------------------


def test_the_limits_have_a_range() -> None:
    with pytest.raises(ValueError, match=r"shard_limits\.max_rows: received 0, accepted 1 to 2147483647"):
        ShardLimits(max_rows=0)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (ShardLimits(max_rows=7), "rows: received 8, accepted at most 7"),
        (ShardLimits(max_footer_bytes=1000), r"footer: received \d+ bytes, accepted at most 1000"),
        (ShardLimits(max_decoded_bytes=1000), r"decoded size: \d+ bytes, accepted at most 1000"),
    ],
)
def test_a_shard_over_a_limit_is_refused_by_name(limits: ShardLimits, reason: str) -> None:
    assert shards.decode(shard()).faults == {}
    with pytest.raises(CorruptObject, match=reason):
        shards.decode(shard(), limits=limits)


@pytest.fixture
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Footers may be parsed; no page may be read."""

    def read(*_args: object, **_options: object) -> None:
        raise AssertionError("pages were unpacked")

    monkeypatch.setattr(pq.ParquetFile, "read", read)


@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize(
    "bomb",
    [mutations.zeros, mutations.claimed_size, mutations.run_of_values, mutations.repeated_text, mutations.long_row],
)
@pytest.mark.parametrize("tell", [False, True])
def test_a_bomb_is_refused_before_it_is_unpacked(bomb, tell: bool) -> None:
    """A million times its size in zeros, in runs of levels or indices, or in one text that many entries name."""
    for seed in range(3):
        parts = Parts.of(shard())
        data = bomb(random.Random(seed), parts, tell, 2**23)
        assert len(data) < 40_000
        with pytest.raises(CorruptObject, match=r"decoded size|rows: received|values: received"):
            shards.decode(data, limits=SMALL)


@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize(
    ("number", "value", "reason"),
    [
        (5, 10**9, "values: received 8 in pages, promised 1000000000"),
        (7, 10**9, "received bytes"),
        (7, -1, "field 7 is no count"),
        (9, 10**9, "received bytes"),
        (7, 3, "a page runs over the end of its column"),
    ],
)
def test_a_footer_that_contradicts_the_pages_is_refused(number: int, value: int, reason: str) -> None:
    parts = Parts.of(shard())
    body = parts.body()
    put(column_metadata(parts.footer)[parts.column("reward")], number, value)
    with pytest.raises(CorruptObject, match=f"column reward: .*{reason}|{reason}"):
        shards.decode(parts.finish(body))


def test_front_coded_texts_are_refused() -> None:
    """Each may repeat the one before it: few bytes, many texts."""
    table = pq.read_table(io.BytesIO(shard()))
    sink = io.BytesIO()
    pq.write_table(table, sink, use_dictionary=False, column_encoding={"messages": "DELTA_BYTE_ARRAY"})
    with pytest.raises(CorruptObject, match="column messages: page encoding: received 7"):
        shards.decode(with_digest(sink.getvalue()))


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip", "lz4"])
@pytest.mark.parametrize("page_version", ["1.0", "2.0"])
def test_sound_files_of_other_writers_are_read(compression: str, page_version: str) -> None:
    table = pq.read_table(io.BytesIO(shard()))
    sink = io.BytesIO()
    pq.write_table(table, sink, compression=compression, data_page_version=page_version, row_group_size=3)
    rows = shards.decode(with_digest(sink.getvalue()))
    assert rows.faults == {}
    assert same_trajectory(rows.trajectory(7), make_group(1)[3])


def test_long_dictionaries_are_measured_entry_by_entry() -> None:
    """Many distinct texts are no bomb: each row has one of them, not all."""
    trajectories = [make_group(i, task_id="t" * 400 + str(i))[0] for i in range(1000)]
    data = shards.encode(trajectories)
    assert shards.decode(data, limits=ShardLimits(max_decoded_bytes=2**23)).num_rows == 1000


# --- page headers ---------------------------------------------------------------------------------


def test_page_headers_say_what_the_parts_say() -> None:
    parts = Parts.of(shard())
    for page in (page for pages in parts.chunks for page in pages):
        header = write_struct(page.header)
        found, end = read_page_header(memoryview(header + b"behind"), 0)
        assert end == len(header)
        own = get(page.header, 7 if found.kind == DICTIONARY else 5)
        assert found == (get(page.header, 1), len(page.body), get(page.header, 3), get(own, 1), get(own, 2))
        assert found.kind in (DATA, DICTIONARY)


def _header(*, changed: Field | None = None) -> list[Field]:
    header = Parts.of(shard()).chunks[0][0].header
    return [changed if changed is not None and field.number == changed.number else field for field in header]


def _nested(depth: int) -> list[Field]:
    return [Field(1, 12, _nested(depth - 1))] if depth else []


_I32 = INTEGERS[2]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (_header(changed=Field(2, _I32, -1)), "field 2 is no count"),
        (_header(changed=Field(2, _I32, 2**31)), "field 2 is no count"),
        (_header(changed=Field(3, _I32, 2**32 + 5)), "field 3 is no count"),  # Parquet's reader would read 5
        (_header(changed=Field(2, 8, b"text")), "field 2 is no count"),
        (_header(changed=Field(1, _I32, 1)), "page type 1"),
        (_header(changed=Field(5, _I32, 1)), "says nothing of its values"),
        ([*_header(), Field(2, _I32, 9)], "field 2 comes twice"),
        ([*_header(), Field(2**15, _I32, 9)], "field 32768 comes twice or has no number"),  # as 16 bits it is -32768
        ([*_header(), Field(9, 9, Items(_I32, [1]))], "type 9, which the format does not have there"),
        ([*_header(), Field(9, 12, _nested(13))], "nested too deep"),
    ],
)
def test_page_headers_that_two_readers_could_read_differently_are_refused(fields: list[Field], reason: str) -> None:
    with pytest.raises(CorruptObject, match=reason):
        read_page_header(memoryview(write_struct(fields)), 0)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_noise_is_no_page_header(noise: bytes) -> None:
    try:
        header, end = read_page_header(memoryview(noise), 0)
    except CorruptObject:
        return
    assert all(0 <= value < 2**31 for value in header)
    assert end > 0


def test_the_decoder_holds_itself_to_the_size_in_a_page_header() -> None:
    """On which the bound rests: a page that unpacks to more than its header says is an error, not memory."""
    codec = pa.Codec("zstd")
    packed = codec.compress(bytes(2**20))
    with pytest.raises((OSError, pa.ArrowException)):
        codec.decompress(packed, 2**10)
    parts = Parts.of(shard())
    page = parts.chunks[parts.column("reward")][0]
    page.body = bytes(2**20)
    size = len(page.to_bytes()) - len(write_struct(page.header))
    page.packed, page.lies = page.to_bytes()[-size:], True
    put(page.header, 2, 64)
    with pytest.raises(CorruptObject, match="unreadable rows"):
        shards.decode(parts.to_bytes())


def test_a_footer_at_which_pyarrow_ends_the_process_is_refused() -> None:
    """`metadata.row_group(0).column(i)` aborts: level histograms of another length than the schema's levels."""
    parts = Parts.of(shard())
    body = parts.body()
    column = column_metadata(parts.footer)[parts.column("tokens.list.element")]
    histogram = get(column, 16, 2)
    histogram.values.pop()
    with pytest.raises(CorruptObject, match="histogram size mismatch"):
        shards.decode(parts.finish(body))

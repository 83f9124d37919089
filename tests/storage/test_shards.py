from __future__ import annotations

import dataclasses
import io
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.trajectories import make_group, make_trajectory, same_trajectory
from tunix_core.errors import CorruptObject, DataError
from tunix_core.storage import shards
from tunix_core.storage.shard_checks import with_digest
from tunix_core.types import SCHEMA_VERSION, Turn

COLUMNS = [
    "trajectory_id",
    "episode_id",
    "fork_index",
    "group_id",
    "group_size",
    "task_id",
    "environment",
    "task_seed",
    "split",
    "actor_id",
    "incarnation",
    "created_at",
    "num_tokens",
    "num_policy_tokens",
    "tokens",
    "loss_mask",
    "behavior_logprobs",
    "token_policy_version",
    "policy_version_min",
    "policy_version_max",
    "temperature",
    "turns",
    "reward",
    "reward_components",
    "finish_reason",
    "generation_seconds",
    "environment_seconds",
    "messages",
    "content_hash",
]


def rewrite(data: bytes, change) -> bytes:
    """Decode to a plain table, change it, write it back with the same metadata and a digest: a hostile writer."""
    table = pq.read_table(io.BytesIO(data))
    changed = change(table)
    sink = io.BytesIO()
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), sink)
    return with_digest(sink.getvalue())


def _nullable(kind: pa.DataType) -> pa.DataType:
    """The type with entries, fields and values that may be null."""
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, _nullable(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(_nullable(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _nullable(field.type)) for field in kind])
    return kind


def set_rows(column: str, values: dict[int, object], nullable: bool = False):
    """A change for `rewrite`: some rows of a column get other values."""

    def change(table: pa.Table) -> pa.Table:
        index = table.schema.get_field_index(column)
        field = table.schema.field(index)
        kind = _nullable(field.type) if nullable else field.type
        rows = table.column(column).to_pylist()
        for row, value in values.items():
            rows[row] = value
        return table.set_column(index, pa.field(column, kind, nullable=True), pa.array(rows, kind))

    return change


def test_round_trip() -> None:
    trajectories = [make_trajectory(i, num_tokens=1 + i * 7) for i in range(9)]
    rows = shards.decode(shards.encode(trajectories, metadata={"actor_id": "a"}), vocab_size=272)
    assert rows.faults == {}
    assert rows.num_rows == 9
    assert rows.metadata == {"actor_id": "a", "schema_version": str(SCHEMA_VERSION)}
    for i, trajectory in enumerate(trajectories):
        assert same_trajectory(rows.trajectory(i), trajectory)


def test_columns_are_those_of_the_schema() -> None:
    data = shards.encode(make_group(0))
    assert pq.read_table(io.BytesIO(data)).column_names == COLUMNS
    rows = shards.decode(data)
    assert rows.column("num_tokens").tolist() == [12] * 4
    expected = [t.policy_version_min for t in make_group(0)]
    assert rows.column("policy_version_min").tolist() == expected
    assert rows.column("group_id").tolist() == ["00000000-00000000"] * 4
    with pytest.raises(KeyError, match="ragged"):
        rows.column("tokens")
    with pytest.raises(KeyError):
        rows.column("no_such_column")


def test_numeric_lists_are_views() -> None:
    trajectories = make_group(0)
    rows = shards.decode(shards.encode(trajectories))
    for name in ("tokens", "behavior_logprobs", "token_policy_version"):
        offsets, values = rows.ragged(name)
        assert not values.flags.owndata
        assert not offsets.flags.owndata
        assert np.array_equal(values, np.concatenate([getattr(t, name) for t in trajectories]))
        assert np.shares_memory(rows.list_value(name, 2), values)
    assert rows.ragged("loss_mask")[1].dtype == bool


def test_encodings() -> None:
    """zstd everywhere, byte stream split on float lists, dictionaries on texts and versions only."""
    group = pq.ParquetFile(io.BytesIO(shards.encode(make_group(0)))).metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert "BYTE_STREAM_SPLIT" in columns["behavior_logprobs.list.element"].encodings
    dictionaries = {name for name, column in columns.items() if column.has_dictionary_page}
    assert "token_policy_version.list.element" in dictionaries
    assert not dictionaries & {"tokens.list.element", "behavior_logprobs.list.element", "loss_mask.list.element"}
    for name in dictionaries - {"token_policy_version.list.element"}:
        assert columns[name].physical_type == "BYTE_ARRAY"


def test_an_empty_shard() -> None:
    rows = shards.decode(shards.encode([], metadata={"tombstone": "true"}))
    assert rows.num_rows == 0
    assert rows.faults == {}
    assert rows.ragged("tokens")[0].tolist() == [0]


def test_tombstones() -> None:
    assert shards.is_tombstone(shards.encode([], metadata={"tombstone": "true"}))
    assert not shards.is_tombstone(shards.encode(make_group(0)))
    assert not shards.is_tombstone(b"garbage")


def test_content_hash_covers_what_training_reads() -> None:
    t = make_trajectory()
    arrays = [t.tokens, t.loss_mask, t.behavior_logprobs, t.token_policy_version]
    original = shards.content_hash(*arrays, t.reward)
    assert original == shards.content_hash(*(a.copy() for a in arrays), t.reward)
    for i, array in enumerate(arrays):
        changed = array.copy()
        changed[0] = not changed[0] if changed.dtype == bool else changed[0] + 1
        assert shards.content_hash(*arrays[:i], changed, *arrays[i + 1 :], t.reward) != original
    assert shards.content_hash(*arrays, t.reward + 1e-9) != original
    assert shards.content_hash(*(a[:-1] for a in arrays), t.reward) != original
    assert len(original) == 64


def nan_logprobs(index: int) -> np.ndarray:
    values = make_trajectory(index).behavior_logprobs.copy()
    values[0] = math.nan
    return values


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"behavior_logprobs": nan_logprobs(1)}, "behavior_logprobs: not finite"),
        ({"behavior_logprobs": np.full(12, -np.inf, np.float32)}, "behavior_logprobs: not finite"),
        ({"behavior_logprobs": np.zeros(11, np.float32)}, "behavior_logprobs: length"),
        ({"loss_mask": np.ones(13, bool)}, "loss_mask: length"),
        ({"token_policy_version": np.zeros(2, np.int32)}, "token_policy_version: length"),
        ({"tokens": np.full(12, 272, np.int32)}, "tokens: accepted 0 to 271"),
        ({"tokens": np.full(12, -1, np.int32)}, "tokens: accepted 0 to 271"),
        ({"token_policy_version": np.full(12, -1, np.int32)}, "token_policy_version: negative on a policy token"),
        ({"reward": math.nan}, "reward: not finite"),
        ({"reward": -1e39}, "reward: not finite"),
        ({"temperature": 0.0}, "temperature: accepted above 0"),
        ({"temperature": math.inf}, "temperature: not finite"),
        ({"group_size": 0}, "group_size"),
        ({"turns": [Turn(role="policy", start=3, end=13)]}, "turns: indices"),
        ({"turns": [Turn(role="policy", start=-1, end=3)]}, "turns: indices"),
        ({"turns": [Turn(role="policy", start=4, end=3)]}, "turns: indices"),
        ({"turns": [Turn(role="policy", start=0, end=3, reward=math.inf)]}, "turns.reward: not finite"),
        ({"turns": [Turn(role="policy", start=0, end=3, seconds=math.nan)]}, "turns.seconds: not finite"),
        ({"fork_index": -1}, "fork_index: accepted at least 0"),
        ({"split": "test"}, "split: accepted train or held_out"),
        ({"split": ""}, "split: accepted train or held_out"),
        ({"reward_components": {"format": 1.0, "correct": math.nan}}, "reward_components: not finite"),
        ({"reward_components": {"correct": -math.inf}}, "reward_components: not finite"),
        ({"reward_components": {"x" * 513: 1.0}}, "reward_components: accepted names of at most 512 bytes"),
        ({"reward_components": {"a\nb": 1.0}}, "reward_components: a name has control characters"),
        ({"reward_components": {str(i): 1.0 for i in range(1025)}}, "reward_components: accepted at most 1024"),
        ({"generation_seconds": math.nan}, "generation_seconds: not finite"),
        ({"environment_seconds": math.inf}, "environment_seconds: not finite"),
        ({"trajectory_id": ""}, "trajectory_id: empty"),
        ({"episode_id": "é" * 257}, "episode_id: accepted at most 512 bytes"),
        ({"task_id": "x" * 100_000}, "task_id: accepted at most 512 bytes"),
        ({"environment": "a\x00b"}, "environment: has control characters"),
        ({"finish_reason": "\x1b[2J"}, "finish_reason: has control characters"),
    ],
)
def test_a_faulty_row_costs_itself_only(changes: dict, reason: str) -> None:
    trajectories = [make_trajectory(0), make_trajectory(1, **changes), make_trajectory(2)]
    rows = shards.decode(shards.encode(trajectories), vocab_size=272)
    assert list(rows.faults) == [1]
    assert rows.faults[1].startswith(reason)
    for row in (0, 2):
        assert same_trajectory(rows.trajectory(row), trajectories[row])
    with pytest.raises(CorruptObject, match="row 1"):
        rows.trajectory(1)


def test_without_a_vocabulary_large_tokens_pass() -> None:
    data = shards.encode([make_trajectory(tokens=np.full(12, 300_000, np.int32))])
    assert shards.decode(data).faults == {}
    assert 0 in shards.decode(data, vocab_size=272).faults


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("num_policy_tokens", 99, "num_policy_tokens: differs"),
        ("policy_version_min", 0, "policy_version_min: differs"),
        ("policy_version_max", 99, "policy_version_max: differs"),
        ("content_hash", "0" * 64, "content_hash: differs"),
        ("reward", 5.0, "content_hash: differs"),
        ("behavior_logprobs", None, "behavior_logprobs: null"),
        ("behavior_logprobs", [None] * 12, "behavior_logprobs: null entry"),
        ("loss_mask", [None] * 12, "loss_mask: null entry"),
        ("tokens", [None] * 12, "tokens: null entry"),
        ("trajectory_id", None, "trajectory_id: null"),
        ("group_size", None, "group_size: null"),
        ("num_tokens", -1, "tokens: length differs from num_tokens"),
        ("reward_components", [("correct", None)], "reward_components: null entry"),
        ("reward_components", None, "reward_components: null"),
        ("turns", [None], "turns: null entry"),
        ("turns", [{"role": None}], "turns.role: null"),
        ("split", None, "split: null"),
    ],
)
def test_a_row_that_contradicts_itself_is_faulty(column: str, value: object, reason: str) -> None:
    data = rewrite(shards.encode(make_group(0)), set_rows(column, {2: value}, nullable=True))
    rows = shards.decode(data, vocab_size=272)
    assert list(rows.faults) == [2]
    assert rows.faults[2].startswith(reason)


def test_a_trajectory_id_may_come_once_in_a_shard() -> None:
    again = make_trajectory(0, reward=2.0)
    rows = shards.decode(shards.encode([*make_group(0), again, *make_group(1)]))
    assert rows.faults == {4: "trajectory_id: an earlier row of this shard has it"}
    broken = make_trajectory(0, temperature=-1.0)  # is none, so what comes after it is the first
    assert set(shards.decode(shards.encode([broken, *make_group(0)])).faults) == {0}


def test_a_group_that_disagrees_on_its_size_is_faulty() -> None:
    """All of it: which row lies cannot be told. Other groups of the shard stay."""
    first, *others = make_group(0)
    other_size = dataclasses.replace(first, group_size=8)
    rows = shards.decode(shards.encode([other_size, *others, *make_group(1)]))
    assert rows.faults == dict.fromkeys(range(4), "group_size: differs within the group")
    too_small = [dataclasses.replace(trajectory, group_size=3) for trajectory in make_group(0)]
    rows = shards.decode(shards.encode([*make_group(1), *too_small]))
    assert rows.faults == dict.fromkeys(range(4, 8), "group_size: below the episodes of the group")
    forks = [dataclasses.replace(t, episode_id="one", fork_index=i) for i, t in enumerate(too_small)]
    assert shards.decode(shards.encode(forks)).faults == {}
    missing = make_group(0)[:2]  # of four
    assert shards.decode(shards.encode(missing)).faults == {}


def test_texts_that_are_none_cost_the_shard() -> None:
    """Arrow checks all texts of a column at once."""

    def change(table: pa.Table) -> pa.Table:
        index = table.schema.get_field_index("group_id")
        raw = pa.array([b"\xff\xfe" if row == 2 else b"x" for row in range(table.num_rows)]).view(pa.string())
        return table.set_column(index, "group_id", raw)

    with pytest.raises(CorruptObject, match="Invalid UTF8"):
        shards.decode(rewrite(shards.encode(make_group(0)), change))


def test_a_trajectory_without_policy_tokens_is_no_fault() -> None:
    nothing = {
        "loss_mask": np.zeros(12, bool),
        "behavior_logprobs": np.zeros(12, np.float32),
        "token_policy_version": np.full(12, -1, np.int32),
    }
    rows = shards.decode(shards.encode([make_trajectory(**nothing)]))
    assert rows.faults == {}
    assert rows.column("policy_version_min").tolist() == [-1]


def test_a_newer_schema_is_refused_by_name() -> None:
    data = shards.encode(make_group(0))
    table = pq.read_table(io.BytesIO(data))
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({"tunix.schema_version": "7"}), sink)
    with pytest.raises(CorruptObject, match=r"schema_version: received 7, accepted 1 to 2\. Upgrade"):
        shards.decode(sink.getvalue())


def test_other_parquet_files_are_refused() -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"x": [1]}), sink)
    with pytest.raises(CorruptObject, match="schema_version: received none"):
        shards.decode(sink.getvalue())
    data = shards.encode(make_group(0))
    with pytest.raises(CorruptObject, match="column reward: missing"):
        shards.decode(rewrite(data, lambda table: table.drop_columns(["reward"])))
    as_text = rewrite(
        data, lambda table: table.set_column(22, "reward", pa.array([str(x) for x in range(table.num_rows)]))
    )
    with pytest.raises(CorruptObject, match="column reward: received string, accepted double"):
        shards.decode(as_text)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_garbage_is_refused(garbage: bytes) -> None:
    for data in (garbage, b"PAR1" + garbage + b"PAR1", shards.encode([])[:-20] + garbage):
        with pytest.raises(CorruptObject):
            shards.decode(data)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_flipped_bytes_are_faults_never_wrong_data(data: st.DataObject) -> None:
    """Any change is refused, blamed on rows, or without effect on what training reads."""
    original = make_group(0)
    encoded = bytearray(shards.encode(original))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(encoded) - 1))
        encoded[position] ^= data.draw(st.integers(1, 255))
    try:
        rows = shards.decode(bytes(encoded), vocab_size=272)
    except CorruptObject:
        return
    for row in range(min(rows.num_rows, 4)):
        if row not in rows.faults:
            for name in shards.TOKEN_COLUMNS:
                assert np.array_equal(rows.list_value(name, row), getattr(original[row], name))


def messages_chunk(data: bytes) -> pq.ColumnChunkMetaData:
    group = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0)
    (column,) = (c for i in range(group.num_columns) if (c := group.column(i)).path_in_schema == "messages")
    return column


def test_a_flipped_byte_of_a_text_is_refused() -> None:
    """Also where no hash looks: what people read is under the page's checksum."""
    noise = np.random.default_rng(0).integers(33, 126, 4000).astype(np.uint8).tobytes().decode()
    data = shards.encode([make_trajectory(0, messages=noise)])
    column = messages_chunk(data)
    end = column.data_page_offset + column.total_compressed_size
    for position in range(end - 3000, end, 100):
        flipped = data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
        with pytest.raises(CorruptObject):
            shards.decode(flipped)


def test_texts_are_stored_once() -> None:
    """Not again as a minimum and a maximum of page and file; short columns keep theirs, for queries."""
    noise = np.random.default_rng(0).integers(33, 126, 4000).astype(np.uint8).tobytes().decode()
    data = shards.encode([make_trajectory(0, messages=noise)])
    assert messages_chunk(data).statistics is None
    assert len(data) - len(shards.encode([make_trajectory(0, messages="")])) < 4200
    group = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert columns["policy_version_min"].statistics.max == make_trajectory(0).policy_version_min


def test_a_writers_own_check() -> None:
    shards.check_group_sizes(make_group(0) + make_group(1))
    shards.check_group_sizes(make_group(0)[:2])  # members may be missing
    with pytest.raises(DataError, match="twice"):
        shards.check_group_sizes([make_trajectory(0), make_trajectory(0)])
    with pytest.raises(DataError, match="at most group_size = 4"):
        shards.check_group_sizes([*make_group(0), make_trajectory(4, group_id="00000000-00000000")])
    fork = make_trajectory(4, group_id="00000000-00000000", episode_id="episode-0", fork_index=1)
    shards.check_group_sizes([*make_group(0), fork])  # forks are one episode

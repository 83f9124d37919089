import dataclasses
import io
import math
import random
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.support import make_group, make_trajectory
from tests.data.test_buffer import ids, make_buffer, take
from tests.fuzz.mutations import long_row
from tests.fuzz.parquet_parts import Parts, set_text
from tunix_core import paths
from tunix_core.data.ingestion import Ingestion
from tunix_core.data.rows import RowFetcher, from_shard, from_trajectories
from tunix_core.storage.quarantine import read_quarantine
from tunix_core.storage.shard_checks import with_digest
from tunix_core.storage.shards import decode, encode
from tunix_core.storage.store import ObjectStore, open_store
from tunix_core.storage.trajectory_writer import TrajectoryWriter
from tunix_core.types import RowRef, Trajectory


@pytest.fixture
def store(tmp_path) -> ObjectStore:
    return open_store(str(tmp_path))


def writer(store: ObjectStore, incarnation: str = "a0") -> TrajectoryWriter:
    return TrajectoryWriter(store, actor_id="actor_0_0", incarnation=incarnation)


def test_shards_reach_the_buffer_and_the_cursors_follow(store: ObjectStore) -> None:
    buffer = make_buffer()
    ingestion = Ingestion(store, buffer, vocab_size=64)
    assert ingestion.poll() == 0
    shards = writer(store)
    shards.write(make_group("g0"))
    shards.write(make_group("g1") + make_group("g2"))
    assert ingestion.poll() == 2
    assert buffer.cursors["cursors"]["a0"]["next_sequence"] == 2
    assert buffer.ledger.trajectories()["buffered"] == 6
    # a reader that goes on from the noted cursors reads nothing twice
    shards.write(make_group("g3"))
    again = Ingestion(store, buffer, vocab_size=64)
    assert again.poll() == 1
    assert buffer.ledger.trajectories()["duplicate"] == 0


def test_a_broken_shard_and_broken_rows_are_recorded_and_the_rest_goes_on(store: ObjectStore) -> None:
    buffer = make_buffer()
    shards = writer(store)
    broken = shards.write(make_group("g0"))
    store.put(broken, store.get(broken)[:100])
    bad = make_trajectory("g1/1", reward=1.0)
    bad.behavior_logprobs[6] = np.nan
    foreign = dataclasses.replace(make_trajectory("g1/2"), tokens=np.full(12, 64, np.int32))
    good = [make_trajectory("g1/0"), make_trajectory("g1/3", reward=1.0)]
    partly = shards.write([dataclasses.replace(t, group_size=4) for t in [good[0], bad, foreign, good[1]]])
    Ingestion(store, buffer, vocab_size=64).poll()
    assert buffer.ledger.unreadable == {broken: 100}
    assert buffer.ledger.trajectories()["quarantined"] == 2
    assert buffer.ledger.trajectories()["buffered"] == 2
    entries = {entry.shard: entry for entry in read_quarantine(store)}
    assert entries[broken].reason
    assert entries[broken].num_bytes == 100
    assert set(entries[partly].rows) == {1, 2}
    assert "not finite" in entries[partly].rows[1]


def _of_version(data: bytes, version: str) -> bytes:
    parts = Parts.of(data)
    body = parts.body()
    set_text(parts.footer, "tunix.schema_version", version)
    return parts.finish(body)


def _without_reward(data: bytes) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pq.read_table(io.BytesIO(data)).drop_columns(["reward"]), sink)
    return with_digest(sink.getvalue())


def _bomb(data: bytes) -> bytes:
    return long_row(random.Random(0), Parts.of(data), True, 2**28)


BROKEN = {
    "empty": (lambda _: b"", "no Parquet file: 0 bytes"),
    "text": (lambda _: b"../../etc/passwd" * 100, "no Parquet file: 1600 bytes"),
    **{
        f"cut at {part}/20": (lambda data, part=part: data[: len(data) * part // 20], "no Parquet file")
        for part in range(1, 20)
    },
    "flipped": (lambda data: data[:700] + bytes([data[700] ^ 16]) + data[701:], "sha256: the bytes are not those"),
    "another's footer": (lambda data: data[:900] + encode(make_group("other"))[900:], "sha256: |no Parquet file"),
    "newer": (lambda data: _of_version(data, "3"), "schema_version: received 3, accepted 1 to 2. Upgrade this reader."),
    "no shard": (lambda data: _of_version(data, "x"), "This is no trajectory shard."),
    "schema": (_without_reward, "column reward: missing"),
    "bomb": (_bomb, "decoded size: .* accepted at most"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_shard_is_in_quarantine_with_its_reason_and_the_run_goes_on(store: ObjectStore, kind: str) -> None:
    change, reason = BROKEN[kind]
    buffer, shards = make_buffer(), writer(store)
    key = shards.write(make_group("g0"))
    broken = change(store.get(key))
    store.put(key, broken)
    shards.write(make_group("g1"))
    ingestion = Ingestion(store, buffer, vocab_size=64)
    assert ingestion.poll() == 2
    (entry,) = read_quarantine(store)
    assert (entry.shard, entry.num_bytes, entry.rows) == (key, len(broken), {})
    assert entry.reason is not None
    assert re.search(reason, entry.reason)
    assert buffer.ledger.unreadable == {key: len(broken)}
    assert ids(take(buffer, 1, 0).groups) == ["g1"]
    assert ingestion.poll() == 0


def test_a_shard_of_an_older_schema_reaches_the_buffer(store: ObjectStore) -> None:
    """As a run has them that an earlier release began."""
    buffer = make_buffer(max_staleness=8)
    buffer.advance(8)
    key = writer(store).write(make_group("g0"))
    store.put(key, (Path(__file__).parents[1] / "storage" / "data" / "schema-1.parquet").read_bytes())
    Ingestion(store, buffer, vocab_size=272).poll()
    assert read_quarantine(store) == []
    assert buffer.ledger.trajectories()["buffered"] == 8


def test_rows_that_contradict_each_other_are_in_quarantine_by_number(store: ObjectStore) -> None:
    """Each costs itself, or its group where it cannot be told which lies; other groups are trained on."""
    buffer = make_buffer()
    bad = [
        dataclasses.replace(make_trajectory("g0/0", group_size=9), split="test"),
        make_trajectory("g0/1", group_size=9, fork_index=-1),
        dataclasses.replace(make_trajectory("g0/2", group_size=9), reward_components={"answer": math.nan}),
        dataclasses.replace(make_trajectory("g0/3", group_size=9), episode_id="../" * 200),
        *make_group("g1"),
        make_trajectory("g1/0", reward=1.0),  # again
        make_trajectory("g2/0", group_size=2),
        make_trajectory("g2/1", group_size=3),
    ]
    data = encode([*bad, *make_group("g3")])
    key = writer(store).write(make_group("g0"))
    store.put(key, data)
    Ingestion(store, buffer, vocab_size=64).poll()
    (entry,) = read_quarantine(store)
    assert entry.reason is None
    assert entry.rows == {
        0: "split: accepted train or held_out",
        1: "fork_index: accepted at least 0",
        2: "reward_components: not finite",
        3: "episode_id: accepted at most 512 bytes",
        6: "trajectory_id: an earlier row of this shard has it",
        7: "group_size: differs within the group",
        8: "group_size: differs within the group",
    }
    assert buffer.ledger.trajectories()["quarantined"] == 7
    assert ids(take(buffer, 2, 0).groups) == ["g1", "g3"]


def test_rows_of_unequal_lengths_do_not_shift_their_neighbours() -> None:
    torn = dataclasses.replace(make_trajectory("g/0"), behavior_logprobs=np.full(3, -1, np.float32))
    after = make_trajectory("g/1", reward=1.0)
    rows = from_shard("s", decode(encode([torn, after, make_trajectory("g/2")])), incarnation="a0")
    assert set(rows.faults) == {0}
    own = slice(rows.offsets[1], rows.offsets[2])
    np.testing.assert_array_equal(rows.behavior_logprobs[own], after.behavior_logprobs)
    buffer = make_buffer()
    buffer.add(rows)
    (group,) = buffer.take(1, 0, max_mean_staleness=math.inf).groups
    np.testing.assert_array_equal(group.rows.behavior_logprobs[:12], after.behavior_logprobs)


def test_columns_of_a_shard_equal_single_trajectories() -> None:
    trajectories: list[Trajectory] = [
        *make_group("g", size=4),
        dataclasses.replace(make_trajectory("h/0", reward=2.0), reward_components={}),
        dataclasses.replace(make_trajectory("h/1", reward=2.0), reward_components={"answer": 0.0, "style": 1.0}),
    ]
    fast = from_shard("s", decode(encode(trajectories)), incarnation="a0", with_turns=True)
    slow = from_trajectories("s", trajectories, incarnation="a0")
    for field in dataclasses.fields(fast):
        left, right = getattr(fast, field.name), getattr(slow, field.name)
        if field.name == "turns":
            continue  # `test_turns`
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype, field.name
            np.testing.assert_array_equal(left, right, err_msg=field.name)
        else:
            assert left == right, field.name
    assert fast.successes.tolist() == [0, 1, 0, 1, 1, 0]


def test_rows_by_reference(store: ObjectStore) -> None:
    key = writer(store).write(make_group("g", size=4))
    rows = RowFetcher(store)([RowRef(shard=key, row=3), RowRef(shard=key, row=1)])
    assert rows.trajectory_ids == ["g/3", "g/1"]
    assert rows.index.tolist() == [3, 1]
    assert paths.parse_shard(rows.shard).incarnation == "a0"

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, precondition, rule

from tests.storage.test_trajectory_writer import HOUR, Clock, open_writer
from tests.support.stores import ScriptedStore
from tests.support.trajectories import make_group, same_trajectory
from tunix_core import paths
from tunix_core.errors import ConfigError, CorruptObject, Fenced, ObjectMissing, StoreError
from tunix_core.storage import trajectory_reader
from tunix_core.storage.shard_archive import RowReader, read_row, read_rows
from tunix_core.storage.store import ObjectStore, open_store
from tunix_core.storage.trajectory_reader import ShardRead, TrajectoryReader
from tunix_core.storage.trajectory_writer import TrajectoryWriter
from tunix_core.storage.writers import announce_hour, fence_incarnation, new_incarnation, read_writer
from tunix_core.types import RowRef


def drain(reader: TrajectoryReader, max_shards: int = 64) -> list[ShardRead]:
    """Poll until the checks that an idle reader only makes now and then have come round."""
    reads: list[ShardRead] = []
    idle = 0
    while idle < 2 * trajectory_reader._IDLE_POLLS_PER_CHECK + 2:
        new = reader.poll(max_shards)
        reads += new
        idle = 0 if new else idle + 1
    return reads


def test_every_shard_is_read_once(store: ObjectStore) -> None:
    clock = Clock()
    reader = TrajectoryReader(store, clock=clock)
    assert reader.poll() == []
    writers = [open_writer(store, clock, f"inc{i}") for i in range(3)]
    expected = [writer.write(make_group(i)) for i in range(5) for writer in writers]
    reads = reader.poll()
    assert sorted(read.key for read in reads) == sorted(expected)
    assert reader.poll() == []
    assert all(read.rows is not None and read.rows.num_rows == 4 and read.num_bytes > 0 for read in reads)
    for name in ("inc0", "inc1", "inc2"):
        assert [read.sequence for read in reads if read.incarnation == name] == [0, 1, 2, 3, 4]
    assert reader.next_sequences() == {"inc0": 5, "inc1": 5, "inc2": 5}


@pytest.mark.parametrize(
    "change",
    [
        {"actor_id": "../../etc"},
        {"actor_id": "a/b"},
        {"actor_id": "a" * 101},
        {"incarnation": "inc1"},  # another's
        {"hours": [["../../steps", 0]]},
        {"hours": [["date=2026-11-30/hour=04", -1]]},
        {"hours": 7},
        {"created_at": 1e999},
        {"next_sequence": "many"},
        b"garbage",
        b"[" * 100_000,
        b'{"incarnation": 1}',
        b"\xff\xfe",
    ],
)
@pytest.mark.parametrize("is_known", [False, True])
def test_a_broken_announcement_costs_its_writer_alone(
    memory: ObjectStore, change: dict | bytes, is_known: bool
) -> None:
    """Whether it is so from the start or becomes so: an alarm, nothing of it is read, and no other key is looked at."""
    clock = Clock()
    bad, good = open_writer(memory, clock, "inc0"), open_writer(memory, clock, "inc2")
    bad.write(make_group(0))
    good.write(make_group(1))
    reader = TrajectoryReader(memory, clock=clock)
    expected = ["inc2"]
    if is_known:
        assert len(reader.poll()) == 2
        bad.write(make_group(2))
        good.write(make_group(3))
        clock.now += 3600  # so that announcements are read again
        expected = ["inc0", "inc2"]  # its shards are where it said that they would be
    sound = memory.get(paths.writer("inc0"))
    broken = change if isinstance(change, bytes) else json.dumps({**json.loads(sound), **change}).encode()
    memory.put(paths.writer("inc0"), broken)
    reads = drain(reader)
    assert sorted(read.incarnation for read in reads) == expected
    (alarm,) = reader.alarms
    assert alarm.startswith("writers/inc0.json: ")
    assert len(alarm) < 600
    memory.put(paths.writer("inc0"), sound)
    assert [read.incarnation for read in drain(reader)] == ([] if is_known else ["inc0"])
    assert is_known or reader.alarms == []


def test_foreign_objects_among_shards_and_announcements_are_passed_over(memory: ObjectStore) -> None:
    clock = Clock()
    writer = open_writer(memory, clock, "inc0")
    key = writer.write(make_group(0))
    stem = key.removesuffix("00000000.parquet")
    for name in (
        "00000001.parquet.tmp",
        "1.parquet",
        "x-00000001.parquet",
        "0000000\N{ARABIC-INDIC DIGIT TWO}.parquet",
    ):
        memory.put(stem + name, b"foreign")
    memory.put("writers/notes.txt", b"foreign")
    reader = TrajectoryReader(memory, clock=clock)
    assert [read.key for read in drain(reader)] == [key]
    second = writer.write(make_group(1))
    assert [read.key for read in drain(reader)] == [second]
    assert reader.alarms == []


def test_a_poll_is_bounded_and_fair(memory: ObjectStore) -> None:
    busy, quiet = open_writer(memory, incarnation="inc0"), open_writer(memory, incarnation="inc1")
    for i in range(10):
        busy.write(make_group(i))
    quiet.write(make_group(20))
    reader = TrajectoryReader(memory, clock=Clock())
    first = reader.poll(4)
    assert [(read.incarnation, read.sequence) for read in first] == [("inc0", 0), ("inc1", 0), ("inc0", 1), ("inc0", 2)]
    assert [read.sequence for read in reader.poll(100)] == list(range(3, 10))


def test_hours_are_followed(store: ObjectStore) -> None:
    clock = Clock()
    reader = TrajectoryReader(store, clock=clock)
    writer = open_writer(store, clock)
    expected = []
    for i in range(4):
        expected.append(writer.write(make_group(2 * i)))
        if i % 2:
            assert [read.key for read in drain(reader)] == expected[-2:]
        clock.now += (1 + 30 * i) * HOUR
    writer.close()
    assert [read.key for read in drain(TrajectoryReader(store, clock=clock))] == expected
    assert drain(reader) == []
    assert reader.live_incarnations() == []


def test_an_hour_without_shards_is_passed(memory: ObjectStore) -> None:
    """A writer may announce an hour and reach the next one before anything lands."""
    clock = Clock()
    writer = open_writer(memory, clock)
    writer.write(make_group(0))
    announce_hour(memory, read_writer(memory, "inc0"), paths.hour_partition(clock.now + HOUR), 1)
    reader = TrajectoryReader(memory, clock=clock)
    assert len(drain(reader)) == 1
    clock.now += 2 * HOUR
    writer._record = read_writer(memory, "inc0")
    writer.write(make_group(1))
    assert [read.sequence for read in drain(reader)] == [1]
    assert reader.alarms == []


@pytest.mark.parametrize("end", ["close", "fence"])
@pytest.mark.parametrize("num_shards", [0, 2])
def test_an_ended_writer_is_read_to_its_end_and_never_asked_again(
    memory: ObjectStore, end: str, num_shards: int
) -> None:
    store = ScriptedStore(memory)
    writer = open_writer(store)
    reader = TrajectoryReader(store, clock=Clock())
    for i in range(num_shards):
        writer.write(make_group(i))
    assert len(reader.poll()) == num_shards
    assert reader.live_incarnations() == ["inc0"]
    if end == "close":
        writer.close()
    else:
        fence_incarnation(store, "inc0")
    reader.poll()
    assert reader.live_incarnations() == []
    store.calls.clear()
    assert reader.poll() == []
    assert store.calls == [("list_after", "writers/")]
    restored = TrajectoryReader(store, reader.state(), clock=Clock())
    store.calls.clear()
    assert restored.poll() == []
    assert store.calls == [("list_after", "writers/")]


def test_an_idle_writer_costs_one_request(memory: ObjectStore) -> None:
    store = ScriptedStore(memory)
    writer = open_writer(store)
    for i in range(50):
        writer.write(make_group(i))
    reader = TrajectoryReader(store, clock=Clock())
    drain(reader)
    store.calls.clear()
    for _ in range(10):
        reader.poll()
    listings = [key for verb, key in store.calls if verb == "list_after" and key.startswith("trajectories/")]
    others = [call for call in store.calls if call != ("list_after", "writers/") and call[0] != "list_after"]
    assert len(listings) in (10, 11)
    assert len(others) <= 1  # the announcement, now and then
    writer.write(make_group(99))
    store.calls.clear()
    assert len(reader.poll()) == 1
    assert len(store.calls) == 3  # writers, names, the shard


def test_listings_start_behind_the_cursor(gcs, tmp_path) -> None:
    """No listing returns history: asked of the store itself, not of a counter."""
    for uri in (str(tmp_path), "memory://behind", f"{gcs.uri}/behind"):
        inner = open_store(uri)
        returned: list[int] = []

        class Counting(ScriptedStore):
            def list_after(self, prefix: str, after: str = "") -> list[str]:
                keys = self.inner.list_after(prefix, after)
                if prefix.startswith("trajectories/"):
                    returned.append(len(keys))  # noqa: B023
                return keys

        store = Counting(inner)
        writer = open_writer(store)
        reader = TrajectoryReader(store, clock=Clock())
        for i in range(6):
            writer.write(make_group(i))
            assert len(reader.poll()) == 1
        assert max(returned) == 1


def test_a_missing_number_is_an_alarm_and_not_a_skip(memory: ObjectStore) -> None:
    writer = open_writer(memory)
    keys = [writer.write(make_group(i)) for i in range(4)]
    held_back = memory.get(keys[1])
    memory.delete(keys[1])
    reader = TrajectoryReader(memory, clock=Clock())
    assert [read.sequence for read in drain(reader)] == [0]
    (alarm,) = reader.alarms
    assert "shard 1 is missing" in alarm
    assert reader.next_sequences() == {"inc0": 1}
    assert TrajectoryReader(memory, reader.state(), clock=Clock()).poll() == []
    memory.put(keys[1], held_back)
    assert [read.sequence for read in reader.poll()] == [1, 2, 3]
    assert reader.alarms == []


@pytest.mark.parametrize("what", ["last of an hour", "last before the end"])
def test_a_missing_number_at_an_edge_is_an_alarm(memory: ObjectStore, what: str) -> None:
    clock = Clock()
    writer = open_writer(memory, clock)
    keys = [writer.write(make_group(i)) for i in range(2)]
    if what == "last of an hour":
        clock.now += HOUR
        writer.write(make_group(2))
    else:
        writer.close()
        memory.delete(keys[1].replace("00000001", "00000002"))  # the tombstone too: only the announcement knows
    memory.delete(keys[1])
    reader = TrajectoryReader(memory, clock=clock)
    assert [read.sequence for read in drain(reader)] == [0]
    assert len(reader.alarms) == 1


def test_a_slow_writer_raises_no_alarm(memory: ObjectStore) -> None:
    """Its shard and its next hour appear between the reader's listing and its look at the announcement."""
    store, clock = ScriptedStore(memory), Clock()
    writer = open_writer(memory, clock)
    writer.write(make_group(0))
    reader = TrajectoryReader(store, clock=clock)
    assert len(reader.poll()) == 1

    def act(verb: str, key: str) -> str:
        if verb == "get" and key.startswith("writers/"):
            store.script = lambda _verb, _key: "pass"
            writer.write(make_group(1))
            clock.now += HOUR
            writer.write(make_group(2))
        return "pass"

    store.script = act
    clock.now += HOUR / 2
    reads = []
    for _ in range(40):
        reads += reader.poll()
        assert reader.alarms == []
    assert [read.sequence for read in reads] == [1, 2]


def test_unreadable_shards_and_faulty_rows_are_reported(memory: ObjectStore) -> None:
    writer = open_writer(memory)
    keys = [writer.write(make_group(i)) for i in range(3)]
    memory.put(keys[1], memory.get(keys[1])[:-10])
    reader = TrajectoryReader(memory, clock=Clock(), vocab_size=100)
    reads = reader.poll()
    assert [read.key for read in reads] == keys
    assert reads[1].rows is None
    assert reads[1].fault is not None
    assert reads[1].fault.startswith("no Parquet file")
    assert reads[0].rows is not None
    assert set(reads[0].rows.faults.values()) == {"tokens: accepted 0 to 99"}
    assert reader.poll() == []


def test_a_poll_that_raised_has_not_happened(memory: ObjectStore) -> None:
    store = ScriptedStore(memory)
    reader = TrajectoryReader(store, clock=Clock())
    writers = [open_writer(memory, incarnation=f"inc{i}") for i in range(3)]
    for i in range(3):
        for writer in writers:
            writer.write(make_group(i))
    for failing in itertools.count():
        calls = itertools.count()
        store.script = lambda _verb, _key, n=failing, calls=calls: "fail" if next(calls) == n else "pass"
        state = reader.state()
        try:
            reads = reader.poll()
            break
        except StoreError:
            assert reader.state() == state
    assert failing > 10
    assert len(reads) == 9


def test_ranks_are_by_age(memory: ObjectStore) -> None:
    clock = Clock()
    for name in ("zz", "mm", "aa"):
        open_writer(memory, clock, name)
        clock.now += 1
    reader = TrajectoryReader(memory, clock=clock)
    reader.poll()
    assert reader.live_incarnations() == ["zz", "mm", "aa"]
    assert reader.actor_of("mm") == "actor_0_0"


def test_many_writers_are_discovered_without_listing_them_all(
    memory: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory_reader, "_ONE_LISTING", 20)
    clock = Clock()
    reader = TrajectoryReader(memory, clock=clock)
    names = []
    for i in range(60):
        names.append(new_incarnation(clock.now))
        open_writer(memory, clock, names[-1]).close()
        clock.now += 1800
        reader.poll()
        assert set(reader.state()["cursors"]) == set(names), f"writer {i} is found at once"
    late = new_incarnation(clock.now - 40 * HOUR)  # made on a host whose clock is far behind
    open_writer(memory, clock, late)
    for _ in range(trajectory_reader._POLLS_PER_FULL_LISTING):
        reader.poll()
    assert reader.live_incarnations() == [late]


def test_states_are_json_and_of_a_known_format(memory: ObjectStore) -> None:
    writer = open_writer(memory)
    writer.write(make_group(0))
    reader = TrajectoryReader(memory, clock=Clock())
    reader.poll()
    state = json.loads(json.dumps(reader.state()))
    writer.write(make_group(1))
    assert [read.sequence for read in TrajectoryReader(memory, state, clock=Clock()).poll()] == [1]
    with pytest.raises(ConfigError, match="format"):
        TrajectoryReader(memory, {"format": 2, "cursors": {}})


def test_rows_by_reference(memory: ObjectStore) -> None:
    store = ScriptedStore(memory)
    writer = open_writer(store)
    keys = [writer.write(make_group(i)) for i in range(3)]
    refs = [RowRef(shard=keys[i], row=row) for i, row in [(2, 1), (0, 3), (2, 0), (1, 2)]]
    expected = [make_group(2)[1], make_group(0)[3], make_group(2)[0], make_group(1)[2]]
    assert all(same_trajectory(a, b) for a, b in zip(read_rows(store, refs), expected, strict=True))
    assert same_trajectory(read_row(store, refs[1]), expected[1])
    rows = RowReader(store, max_shards=2)
    rows.read(refs)
    store.calls.clear()
    rows.read(refs[2:])
    assert store.calls == []
    rows.read(refs)
    assert store.calls == [("get", keys[0])]
    with pytest.raises(CorruptObject, match="row 4"):
        read_row(memory, RowRef(shard=keys[0], row=4))
    with pytest.raises(ObjectMissing):
        read_row(memory, RowRef(shard=keys[0].replace("-00000000.", "-00000009."), row=0))


# --- any order of events ----------------------------------------------------------------------

_SPACES = itertools.count()


class ReaderMachine(RuleBasedStateMachine):
    """Writers start, write, stall, close, die and are fenced; clocks jump; stores lose answers; the
    reader is killed and restored. At the end every committed row has been read exactly once."""

    writers = Bundle("writers")

    @initialize()
    def start(self) -> None:
        self.memory = open_store(f"memory://machine-{next(_SPACES)}")
        self.clock = Clock()
        self.reader_store = ScriptedStore(self.memory)
        self.writer_store = ScriptedStore(self.memory)
        self.reader = TrajectoryReader(self.reader_store, clock=self.clock)
        self.read: list[str] = []
        self.saved: tuple[dict, list[str]] = (self.reader.state(), [])
        self.committed: list[str] = []
        self.fenced: set[str] = set()
        self.num_groups = 0
        self.in_doubt: dict[str, list[str]] = {}

    @rule(target=writers, name=st.integers(0, 999))
    def start_writer(self, name: int) -> TrajectoryWriter:
        incarnation = f"{name:03d}x{self.num_groups}x{len(self.memory.list_after('writers/'))}"
        return TrajectoryWriter(self.writer_store, actor_id="a", incarnation=incarnation, clock=self.clock)

    @rule(writer=writers, action=st.sampled_from(["pass", "pass", "pass", "fail", "lose"]))
    def write(self, writer: TrajectoryWriter, action: str) -> None:
        group = make_group(self.num_groups, group_size=2, num_tokens=3)
        ids = [t.trajectory_id for t in group]
        self.num_groups += 1
        self.writer_store.script = lambda verb, key: (
            action if verb == "put_if_absent" and key.startswith("trajectories/") else "pass"
        )
        doubtful = self.in_doubt.pop(writer.incarnation, [])
        try:
            writer.write(group)
            self.committed += doubtful + ids
            assert writer.incarnation not in self.fenced
        except Fenced:
            assert writer.incarnation in self.fenced
            self.committed += doubtful
        except StoreError:
            self.committed += doubtful
            if action == "lose":
                self.committed += ids
        finally:
            self.writer_store.script = lambda _verb, _key: "pass"

    @rule(writer=consumes(writers))
    def close(self, writer: TrajectoryWriter) -> None:
        try:
            writer.close()
            assert writer.incarnation not in self.fenced
        except Fenced:
            assert writer.incarnation in self.fenced

    @rule(writer=writers)
    def fence(self, writer: TrajectoryWriter) -> None:
        """The writer stays in the bundle: it may only seem dead, and try to write on."""
        fence_incarnation(self.memory, writer.incarnation)
        self.fenced.add(writer.incarnation)

    @rule(hours=st.sampled_from([-3.0, 0.01, 0.5, 1.0, 26.0]))
    def pass_time(self, hours: float) -> None:
        self.clock.now += hours * HOUR

    @rule(max_shards=st.integers(1, 6))
    def poll(self, max_shards: int) -> None:
        self._take(self.reader.poll(max_shards))

    @rule(after=st.integers(0, 8))
    def poll_in_trouble(self, after: int) -> None:
        calls = itertools.count()
        self.reader_store.script = lambda _verb, _key: "fail" if next(calls) >= after else "pass"
        try:
            self._take(self.reader.poll())
        except StoreError:
            pass
        finally:
            self.reader_store.script = lambda _verb, _key: "pass"

    @rule()
    def save(self) -> None:
        self.saved = (json.loads(json.dumps(self.reader.state())), list(self.read))

    @precondition(lambda self: self.num_groups > 0)
    @rule()
    def restore(self) -> None:
        """Killed: what was read after the save is read again, by a reader that remembers nothing else."""
        self.reader = TrajectoryReader(self.reader_store, self.saved[0], clock=self.clock)
        self.read = list(self.saved[1])

    def _take(self, reads: list[ShardRead]) -> None:
        assert self.reader.alarms == []
        for read in reads:
            assert read.rows is not None
            assert read.rows.faults == {}
            self.read += read.rows.column("trajectory_id").tolist()

    def teardown(self) -> None:
        if hasattr(self, "reader"):
            self._take(drain(self.reader, max_shards=3))
            assert sorted(self.read) == sorted(self.committed)
            live = set(self.reader.live_incarnations())
            assert not live & self.fenced


TestReaderMachine = ReaderMachine.TestCase
TestReaderMachine.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)

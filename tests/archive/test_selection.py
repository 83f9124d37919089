import math

import pytest

from tests.support.run_factory import START, make_trajectory
from tunix_core import paths
from tunix_core.archive.selection import Selection, select
from tunix_core.errors import ConfigError
from tunix_core.storage.store import ObjectStore, open_store
from tunix_core.storage.trajectory_writer import TrajectoryWriter

HOUR = 3600.0


@pytest.fixture
def store(tmp_path) -> ObjectStore:
    """Two actors, an hour apart: a by versions 0 and 1, b by 2 in another environment."""
    store = open_store(str(tmp_path / "run"))
    for place, (actor, versions, environment) in enumerate((("a", (0, 1), "lookup"), ("b", (2, 2), "sql"))):
        at = START + 30 * HOUR * place
        writer = TrajectoryWriter(store, actor_id=actor, incarnation=f"inc{place}", clock=lambda at=at: at)
        for shard in range(2):
            rows = [
                make_trajectory(
                    f"{actor}{shard}{member}",
                    group_id=f"g{place}{shard}",
                    version=versions[shard],
                    solved=member == 0,
                    actor_id=actor,
                    incarnation=f"inc{place}",
                    environment=environment,
                    created_at=at + shard,
                )
                for member in range(2)
            ]
            writer.write(rows)
    return store


def ids(store: ObjectStore, **conditions: object) -> set[str]:
    return {found.trajectory.trajectory_id for found in select(store, Selection(**conditions))}


def test_each_condition(store: ObjectStore) -> None:
    everything = ids(store)
    assert len(everything) == 8
    assert ids(store, environment="sql") == {"b00", "b01", "b10", "b11"}
    assert ids(store, solved=True) == {"a00", "a10", "b00", "b10"}
    assert ids(store, solved=False) == everything - ids(store, solved=True)
    assert ids(store, min_version=1, max_version=1) == {"a10", "a11"}
    assert ids(store, max_version=0) == {"a00", "a01"}
    assert ids(store, group="g01", max_reward=0.5) == {"a11"}
    assert ids(store, actor="b", finish_reason="truncated") == {"b01", "b11"}
    assert ids(store, split="held_out") == set()
    assert ids(store, since=START + HOUR) == {"b00", "b01", "b10", "b11"}
    assert ids(store, until=START + 0.5) == {"a00", "a01"}


def test_hours_that_hold_nothing_are_not_read(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    original = type(store).get
    monkeypatch.setattr(type(store), "get", lambda self, key: read.append(key) or original(self, key))
    assert len(ids(store, since=START + 29 * HOUR)) == 4
    assert all("/b-" in key for key in read if key.startswith(paths.TRAJECTORIES))
    assert len(read) == 2


def test_newest_first_and_in_order(store: ObjectStore) -> None:
    newest = [found.shard for found in select(store, Selection(), newest_first=True)]
    assert newest == sorted(newest, reverse=True)
    found = next(select(store, Selection()))
    assert (found.row, found.trajectory.trajectory_id) == (0, "a00")


def test_what_cannot_be_read_is_told_and_passed_over(store: ObjectStore) -> None:
    store.put_if_absent(paths.ShardName(paths.hour_partition(START), "c", "inc9", 0).key, b"PAR1")
    names = {"actor_id": "d", "incarnation": "inc8"}
    faulty = make_trajectory("faulty", group_id="g", version=0, solved=True, temperature=-1.0, **names)
    TrajectoryWriter(store, **names, clock=lambda: START).write([faulty])
    told: list[str] = []
    assert len(list(select(store, Selection(), refused=told.append))) == 8
    assert len(told) == 2
    assert "c-inc9-00000000.parquet" in told[0]
    assert "row 0: temperature" in told[1]


@pytest.mark.parametrize(
    "conditions",
    [{"min_reward": 1.0, "max_reward": 0.0}, {"min_version": 3, "max_version": 2}, {"since": 2.0, "until": 1.0}],
)
def test_conditions_that_nothing_can_meet_are_refused(conditions: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(conditions))):
        Selection(**conditions)
    assert Selection().max_reward == math.inf

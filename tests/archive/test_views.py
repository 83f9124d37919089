"""SQL over a run, against the same figures from the rows themselves."""

import collections
from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pytest

from tests.support.gcs import emulated_gcs
from tests.support.run_factory import make_run, make_trajectory
from tunix_core import paths
from tunix_core.archive.selection import Selection, select
from tunix_core.archive.views import connect, parquet_files, query
from tunix_core.errors import ConfigError
from tunix_core.storage import compaction
from tunix_core.storage.quarantine import quarantine_rows, quarantine_shard
from tunix_core.storage.shards import SCHEMA, encode
from tunix_core.storage.step_records import read_steps
from tunix_core.storage.store import ObjectStore, open_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    return make_run(open_store(str(tmp_path_factory.mktemp("archive") / "run's"))).store


def rows(store: ObjectStore, sql: str) -> list[tuple]:
    return [tuple(row.values()) for row in query(store, sql).to_pylist()]


def test_every_column_is_there(store: ObjectStore) -> None:
    names = {name for name, *_ in rows(store, "describe trajectories")}
    assert names == {*SCHEMA.names, "shard", "row", "date", "hour"}


def test_rewards_by_version(store: ObjectStore) -> None:
    expected = collections.defaultdict(list)
    for found in select(store, Selection()):
        expected[found.trajectory.policy_version_min].append(found.trajectory.reward)
    answer = rows(store, "select policy_version_min, count(*), avg(reward) from trajectories group by 1 order by 1")
    assert answer == [
        (version, len(values), pytest.approx(sum(values) / len(values))) for version, values in sorted(expected.items())
    ]


def test_consumed_rows_have_their_step_and_age(store: ObjectStore) -> None:
    consumed = [
        (record["clock"], group["shard"], row)
        for record in read_steps(store, 0)
        for group in record["groups"]
        for row in group["rows"]
    ]
    assert sorted(rows(store, "select clock, shard, row from consumed")) == sorted(consumed)
    assert rows(store, "select count(*) from consumed where staleness <> clock - 1 - policy_version_min") == [(0,)]


def test_a_compacted_hour_answers_as_its_shards_did(tmp_path: Path) -> None:
    made = make_run(open_store(str(tmp_path / "run"))).store
    hour = paths.parse_shard(made.list_after(paths.TRAJECTORIES)[0]).hour
    asked = [
        "select * exclude (tokens, turns) from trajectories order by shard, row",
        "select clock, trajectory_id, staleness from consumed order by all",
        "select count(*), sum(reward) from turns",
    ]
    before = [rows(made, sql) for sql in asked]
    rewards = dict(rows(made, "select environment, avg(reward) from trajectories group by all"))
    compaction.compact(made, hour, owner="checkpoint")
    assert [rows(made, sql) for sql in asked] == before, "beside its shards"
    check_readers(made, rewards)
    compaction.retire_sources(made, hour)
    assert compaction.delete_sources(made, hour, grace_seconds=0)
    assert [rows(made, sql) for sql in asked] == before, "without them"
    check_readers(made, rewards)


def test_turns_have_a_row_each(store: ObjectStore) -> None:
    assert rows(store, "select count(*) from turns") == [
        (sum(len(f.trajectory.turns) for f in select(store, Selection())),)
    ]
    tools = rows(store, "select distinct tool_name from turns where role = 'tool'")
    assert tools == [("get",)]
    first = rows(store, "select number, role from turns order by trajectory_id, number limit 4")
    assert first == [(0, "prompt"), (1, "policy"), (2, "tool"), (3, "policy")]


def test_metrics_and_evaluations_have_views(store: ObjectStore) -> None:
    views = {name for (name,) in rows(store, "select table_name from information_schema.tables")}
    assert {"trajectories", "turns", "consumed", "metrics_learner"} <= views
    (steps,) = rows(store, "select max(clock) from metrics_learner")
    assert steps[0] == read_steps(store, 0)[-1]["clock"]


def test_what_was_refused_is_left_out(tmp_path) -> None:
    store = make_run(open_store(str(tmp_path / "run"))).store
    (before,) = rows(store, "select count(*) from trajectories")
    key = store.list_after(paths.TRAJECTORIES)[0]
    quarantine_rows(store, key, {0: "bad"})
    (after,) = rows(store, "select count(*) from trajectories")
    assert after[0] == before[0] - 1
    broken = key.replace("00000000.parquet", "00000009.parquet")
    store.put_if_absent(broken, b"PAR1 and no more")
    quarantine_shard(store, broken, "truncated")
    assert rows(store, "select count(*) from trajectories") == [after]


def test_a_run_that_has_nothing_yet(tmp_path) -> None:
    store = open_store(str(tmp_path / "run"))
    assert rows(store, "select count(*) from trajectories") == [(0,)]
    assert rows(store, "select count(*) from consumed") == [(0,)]


@pytest.mark.parametrize("sql", ["selct 1", "select colour from trajectories", "select 1; drop view x", ""])
def test_a_statement_that_makes_no_sense_is_refused(store: ObjectStore, sql: str) -> None:
    with pytest.raises(ConfigError, match="sql"):
        query(store, sql)


def test_a_query_reads_the_columns_that_it_names(store: ObjectStore) -> None:
    connection = connect(store)
    plan = connection.execute(
        "explain analyze select environment, avg(reward) from trajectories group by all"
    ).fetchall()
    text = str(plan)
    assert "reward" in text
    assert "behavior_logprobs" not in text
    assert "messages" not in text


def test_the_same_on_an_object_store() -> None:
    with emulated_gcs() as emulator:
        store = make_run(open_store(f"{emulator.uri}/archive/run")).store
        assert rows(store, "select count(*) from consumed")[0][0] > 0
        assert rows(store, "select count(distinct shard) from trajectories")[0][0] > 1


def test_pandas_and_polars_read_the_files_themselves(store: ObjectStore) -> None:
    """The examples of the README."""
    folder = store.uri.removeprefix("file://")
    with duckdb.connect() as connection:
        expected = connection.execute(
            f"select environment, avg(reward) from '{folder.replace(chr(39), chr(39) * 2)}/trajectories/**/*.parquet' group by all"
        ).fetchall()
    check_readers(store, dict(expected))


def check_readers(store: ObjectStore, expected: dict[str, float]) -> None:
    files = parquet_files(store)
    lazy = pl.scan_parquet(files, extra_columns="ignore").group_by("environment").agg(pl.col("reward").mean())
    assert dict(lazy.collect().rows()) == pytest.approx(expected)
    frame = pd.read_parquet(files, columns=["environment", "reward"])
    assert dict(frame.groupby("environment")["reward"].mean()) == pytest.approx(expected)


def test_an_empty_shard_is_no_obstacle(tmp_path) -> None:
    """A writer's tombstone has no rows."""
    store = open_store(str(tmp_path / "run"))
    hour = "date=2026-11-30/hour=11"
    names = {"actor_id": "a", "incarnation": "i"}
    store.put_if_absent(f"{paths.TRAJECTORIES}{hour}/a-i-00000001.parquet", encode([], metadata={"tombstone": "true"}))
    row = make_trajectory("t", group_id="g", version=0, solved=True, **names)
    store.put_if_absent(f"{paths.TRAJECTORIES}{hour}/a-i-00000000.parquet", encode([row]))
    assert rows(store, "select trajectory_id from trajectories") == [("t",)]

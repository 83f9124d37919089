"""The data plane benchmark's own logic; nothing here is timed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks import data_plane, ingest_rate, poll_cost, shard_encodings, shard_formats, shard_queries
from tests.benchmarks.data_workload import GROUP_SIZE, make_trajectories
from tests.benchmarks.parts import EXIT_GOAL_MISSED, Part
from tunix_core.archive.views import connect
from tunix_core.storage.shard_schema import TOKEN_COLUMNS
from tunix_core.storage.shards import WRITER_OPTIONS, decode, encode
from tunix_core.storage.store import open_store


def test_all_formats_hold_the_same_numbers() -> None:
    rows = make_trajectories(2 * GROUP_SIZE)
    shard = decode(encode(rows))
    assert not shard.faults
    arrow = shard_formats.FORMATS["Arrow IPC"]
    for name, values in zip(TOKEN_COLUMNS, arrow.decode(arrow.encode(rows)), strict=True):
        np.testing.assert_array_equal(values, shard.ragged(name)[1])
    for name in ("JSON lines", "pickle"):
        form = shard_formats.FORMATS[name]
        for row, found in zip(rows, form.decode(form.encode(rows)), strict=True):
            for column in TOKEN_COLUMNS:
                value = found[column] if isinstance(found, dict) else getattr(found, column)
                np.testing.assert_array_equal(value, getattr(row, column), err_msg=f"{name} {column}")
                assert value.dtype == getattr(row, column).dtype


def test_the_bytes_of_a_shard_add_up() -> None:
    rows = make_trajectories(GROUP_SIZE)
    total = sum(shard_formats.bytes_by_column(rows).values()) * sum(row.num_tokens for row in rows)
    assert total == pytest.approx(len(encode(rows)))


def test_settings_differ_from_the_one_in_use() -> None:
    for name, changes in shard_encodings.settings().items():
        assert (name == shard_encodings.IN_USE) == (not changes)
        assert all(WRITER_OPTIONS.get(key) != value for key, value in changes.items()), name


def test_the_query_counts_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_queries, "ROWS_PER_SHARD", 64)
    store = open_store(str(tmp_path))
    expected = shard_queries.write_rows(store, 300)
    with connect(store) as connection:
        answer = connection.execute(shard_queries.QUERY).fetchall()
    assert sum(row[3] for row in answer) == 300
    assert {tuple(row[:3]): [row[3], row[3] * row[4]] for row in answer} == {
        key: pytest.approx(value) for key, value in expected.items()
    }


def test_ingestion_consumes_all_of_it(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    num_tokens = ingest_rate.write(store, ingest_rate.TRAJECTORIES_PER_BATCH)
    assert ingest_rate.ingest(store, ingest_rate.TRAJECTORIES_PER_BATCH)["num_tokens"] == num_tokens


def test_a_poll_costs_no_more_with_ten_times_the_shards() -> None:
    few, many = poll_cost.poll_cost(3_000), poll_cost.poll_cost(20_000)
    assert many["num_old"] > 4 * few["num_old"]
    assert (many["requests"], many["keys_listed"]) == (few["requests"], few["keys_listed"])
    assert few["requests"] < 3 * poll_cost.NUM_WRITERS


def test_a_missed_goal_fails_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    polls = [{"num_old": n, "requests": n, "keys_listed": 1} for n in (10, 100)]

    def measure(**_: bool) -> tuple[dict, list]:
        return {"polls": polls}, [
            data_plane.poll_cost.Goal("requests of a poll", polls[1]["requests"] / 10, 1.0, at_least=False)
        ]

    assert data_plane.main(["--check"], {"poll": Part(measure, poll_cost.report)}) == EXIT_GOAL_MISSED
    assert "requests of a poll: 10, at most 1" in capsys.readouterr().err

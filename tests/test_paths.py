"""Keys of the run directory: order, round trips, and what may become part of one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunix_core import paths
from tunix_core.errors import ConfigError, DataError


@given(st.integers(0, 10**7), st.integers(0, 10**7))
def test_key_order_is_version_order(a: int, b: int) -> None:
    for key in (paths.step, paths.policy, paths.snapshot, paths.checkpoint):
        assert (key(a) < key(b)) == (a < b)
        assert paths.version_of(key(a)) == a


@given(st.integers(0, 99_999_999), st.integers(0, 4_000_000_000))
def test_shard_key_round_trips(sequence: int, seconds: int) -> None:
    shard = paths.ShardName(paths.hour_partition(seconds), "actor-0-1", "18f2c", sequence)
    assert paths.parse_shard(shard.key) == shard


def test_hour_partition_is_utc() -> None:
    assert paths.hour_partition(0) == "date=1970-01-01/hour=00"
    assert paths.hour_partition(86_399.9) == "date=1970-01-01/hour=23"


@pytest.mark.parametrize(
    "key",
    [
        "trajectories/x.parquet",
        "trajectories/date=2026-01-01/hour=01/a-b-1.parquet",
        "../trajectories/date=2026-01-01/hour=01/a-b-00000001.parquet",
        "",
    ],
)
def test_foreign_shard_keys_are_refused(key: str) -> None:
    with pytest.raises(DataError, match="shard key"):
        paths.parse_shard(key)


@pytest.mark.parametrize(
    "value", ["", "..", "a/b", "../a", "a..b", "A", ".a", "a.", "-a", "a\n", "a\x00b", "ä", "a" * 200, None, 3]
)
def test_hostile_names_are_refused(value) -> None:
    with pytest.raises(ConfigError):
        paths.name("run", value)


@pytest.mark.parametrize("value", ["a", "0", "run-1", "a_b.c-d", "a" * 128])
def test_plain_names_pass(value: str) -> None:
    assert paths.name("run", value) == value


def test_run_name_makes_airflow_ids_safe_and_keeps_them_apart() -> None:
    readable = paths.run_name("post_training", "manual__2026-11-30T04:00:00.1+00:00")
    assert readable.startswith("post-training-manual-2026-11-30t04-00-00-1-00-00-")
    ids = ["A", "a", "a+", "a:", "a" * 300, "a" * 301]
    assert len({paths.run_name("d", i) for i in ids}) == len(ids)

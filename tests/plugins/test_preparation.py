"""What the DAGs do in the worker."""

from __future__ import annotations

import datetime as dt

import pytest

from plugins import preparation
from plugins.runs import config_overrides, format_progress, run_uri
from tunix_core import paths
from tunix_core.errors import ConfigError
from tunix_core.storage import control
from tunix_core.storage.run_directory import list_runs, read_run
from tunix_core.storage.store import ObjectStore, open_store


def test_a_run_keeps_its_configuration_when_it_is_prepared_again(root: str) -> None:
    uri = preparation.open_run(root, "post_training", "manual__1", "lookup", {"learner.num_steps": 7})
    store = open_store(uri)
    control.request_stop(store, reason="crashed", source="learner", failed=True)
    assert preparation.open_run(root, "post_training", "manual__1", "lookup", {"learner.num_steps": 9}) == uri
    config, details = read_run(store)
    assert config.learner.num_steps == 7
    assert (details["dag_id"], details["run_id"]) == ("post_training", "manual__1")
    assert control.read_stop(store) is None  # a person cleared it to go on


def test_a_completed_run_stays_completed(root: str) -> None:
    uri = preparation.open_run(root, "post_training", "manual__1", "lookup", {})
    control.request_stop(open_store(uri), reason="completed", source="learner", failed=False)
    preparation.open_run(root, "post_training", "manual__1", "lookup", {})
    assert control.read_stop(open_store(uri)) is not None


def test_roots_and_names_from_outside_are_checked(root: str) -> None:
    with pytest.raises(ConfigError, match="store_root"):
        run_uri("file:///etc", "d", "r")
    with pytest.raises(ConfigError, match="run"):
        preparation.runs_to_evaluate(root, "../other", dt.datetime.now(dt.UTC), dt.datetime.now(dt.UTC))
    assert run_uri(root, "../..", "a/b:+").startswith(f"{root}/")
    assert "/.." not in run_uri(root, "../..", "a/b:+")


@pytest.mark.parametrize("option", ["start_uri", "reference_uri", "model.pretrained_uri"])
def test_weights_from_outside_the_roots_are_refused(root: str, option: str) -> None:
    with pytest.raises(ConfigError, match="/etc"):
        preparation.open_run(root, "d", "r", "lookup", {option: "file:///etc/policies/00000000"})
    assert not list_runs(root)
    inside = {option: f"{root}/other/policies/00000000"}
    assert read_run(open_store(preparation.open_run(root, "d", "r", "lookup", inside)))


def test_weights_are_handed_to_servers_under_the_roots_only(root: str) -> None:
    served = {"engine.kind": "openai", "engine.base_urls": ["http://a:1", "http://b:1"]}
    with pytest.raises(ConfigError, match="/etc"):
        preparation.open_run(root, "d", "r", "lookup", {**served, "engine.weights_folder": "/etc"})
    assert not list_runs(root)
    inside = {**served, "engine.weights_folder": f"{root.removeprefix('file://')}/weights"}
    assert read_run(open_store(preparation.open_run(root, "d", "r", "lookup", inside)))


def test_empty_fields_keep_the_recipes_values() -> None:
    params = {"seed": 3, "num_steps": None, "overrides": {"actor.replicas": 2}}
    fields = {"seed": "seed", "num_steps": "learner.num_steps"}
    assert config_overrides(params, fields) == {"seed": 3, "actor.replicas": 2}


SUCCESS = {"learner": "success", "sync_weights": "success", "finalize": "success"}


@pytest.mark.parametrize(
    ("stop", "states", "reason"),
    [
        (False, SUCCESS, ""),
        (True, SUCCESS, "stopped by"),
        (False, {**SUCCESS, "sync_weights": "failed"}, "sync_weights is failed"),
        (False, {**SUCCESS, "finalize": "skipped"}, "finalize is skipped"),
        (False, {"learner": "success", "finalize": "success"}, "sync_weights is pending"),
        (None, SUCCESS, "no component"),
    ],
)
def test_the_outcome_of_a_run(store: ObjectStore, stop: bool | None, states: dict[str, str], reason: str) -> None:
    if stop is not None:
        control.request_stop(store, reason="x", source="learner", failed=stop)
    found = preparation.why_unsuccessful(store.uri, states, ["learner", "sync_weights", "finalize"])
    assert reason in found
    assert bool(found) == bool(reason)


def test_runs_with_trajectories_of_an_hour(root: str, store: ObjectStore) -> None:
    hour = dt.datetime(2026, 11, 30, 4, tzinfo=dt.UTC)
    store.put(f"{paths.TRAJECTORIES}{paths.hour_partition(hour.timestamp())}/a-b-00000000.parquet", b"x")
    other = preparation.open_run(root, "post_training", "manual__2", "lookup", {})
    assert len(list_runs(root)) == 2
    assert preparation.runs_to_evaluate(root, "*", hour, hour + dt.timedelta(hours=1)) == [store.uri]
    assert preparation.runs_to_evaluate(root, "*", hour - dt.timedelta(hours=1), hour) == []
    name = other.rsplit("/", 1)[1]
    assert preparation.runs_to_evaluate(root, name, hour, hour + dt.timedelta(hours=1)) == []


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (
            {"busy": 1, "clock": 41, "learner_busy_fraction": 0.8123, "num_steps": 90, "published_version": 40}
            | {"reward_mean": 0.63123, "state": "stepping", "staleness_mean": 1.8, "ledger": {"read": 400, "stale": 3}},
            "step 41/90 stepping reward 0.631 staleness 1.8 version 40 busy 0.812 stale 0.8 % of 400 tokens",
        ),
        ({"incarnation": "x", "rounds": 3, "seconds": 123456.7}, "rounds 3 seconds 123457"),
        ({"loss": float("nan"), "version": 1.0}, "loss nan version 1"),
        ({"ok": True, "none": None, "table": {"a": 1}, "list": ["a"]}, "ok true none - table (a 1) list 1 entries"),
        ({"clock": 1, "num_steps": 2}, "step 1/2"),
        ({}, ""),
    ],
)
def test_progress_reads_well(progress: dict[str, object], line: str) -> None:
    assert format_progress(progress) == line

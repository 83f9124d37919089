"""What the DAGs do in the worker itself: open a run, stop what is left of it, find work to evaluate."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from plugins.runs import check_root, run_uri, store_roots
from tunix_core import paths
from tunix_core.config_loading import load_recipe
from tunix_core.errors import ObjectMissing
from tunix_core.storage import control, process_table
from tunix_core.storage.run_directory import create_run, list_runs, read_run
from tunix_core.storage.shard_archive import ShardArchive
from tunix_core.storage.store import ObjectStore, join_uri, open_store

log = logging.getLogger(__name__)


def open_run(root: str, dag_id: str, run_id: str, recipe: str, overrides: Mapping[str, Any]) -> str:
    """Create the run directory of an Airflow run, or open it again; returns its URI.

    A run that exists keeps its configuration, whatever the recipe says by now. If it was stopped as
    failed (or cancelled), the stop is withdrawn: preparing it again means that a person cleared
    some of its tasks to go on.

    Raises:
        ConfigError: a recipe, an override or a root that is not accepted.
    """
    uri = run_uri(root, dag_id, run_id)
    store = open_store(uri, roots=store_roots())
    try:
        read_run(store)
    except ObjectMissing:
        config = load_recipe(recipe, overrides)
        model, engine = config.model, config.engine
        for uri_from_outside in (model.pretrained_uri, config.reference_uri, config.start_uri, engine.weights_folder):
            if uri_from_outside:
                open_store(uri_from_outside, roots=store_roots())
        create_run(store, config, run_id=run_id, extra={"dag_id": dag_id})
    withdraw_failed_stop(store)
    return uri


def withdraw_failed_stop(store: ObjectStore) -> None:
    """Let a failed run go on; one that has completed stays so."""
    stop = control.read_stop(store)
    if stop is not None and stop.failed:
        log.info("going on with a run that was stopped by %s: %s", stop.source, stop.reason)
        store.delete(paths.STOP)


def actor_processes(uri: str) -> list[str]:
    """Names of the supervised groups of a run's actor pool."""
    config, _ = read_run(open_store(uri, roots=store_roots()))
    return [f"actor-{group}" for group in range(config.actor.num_groups)]


def close_run(uri: str, source: str) -> None:
    """Stop every process of a run that is left at the end of its DAG run."""
    store = open_store(uri, roots=store_roots())
    outcome = process_table.stop_run(store, reason="the DAG run has ended", source=source)
    for process, how in sorted(outcome.items()):
        log.info("%s still ran: %s", process, how)
    if not outcome:
        log.info("no process was left")


def why_unsuccessful(uri: str, task_states: Mapping[str, Any], needed: Sequence[str]) -> str:
    """Empty when the run did what it was for; otherwise the reason, for people.

    Args:
        task_states: task (a mapped one with `_<map index>`) -> its state.
        needed: the tasks that must have succeeded.
    """
    stop = control.read_stop(open_store(uri, roots=store_roots()))
    if stop is not None and stop.failed:
        return f"stopped by {stop.source}: {stop.reason}"
    missed = [
        f"{task} is {task_states.get(task) or 'pending'}" for task in needed if task_states.get(task) != "success"
    ]
    if missed:
        return ", ".join(missed)
    return "" if stop is not None else "no component reported the run as completed"


def runs_to_evaluate(root: str, run: str, start: dt.datetime, end: dt.datetime) -> list[str]:
    """URIs of the runs with trajectories of the hours in `[start, end)`.

    Args:
        run: name of one run, or `*` for all under the root.

    Raises:
        ConfigError: a root or a name that is not accepted, or no such run.
    """
    root = check_root(root)
    names = list_runs(root) if run == "*" else [paths.name("run", run)]
    found = []
    for name in names:
        uri = join_uri(root, name)
        store = open_store(uri, roots=store_roots())
        read_run(store)
        hour = start
        while hour < end:
            if ShardArchive(store).keys(paths.hour_partition(hour.timestamp())):
                found.append(uri)
                break
            hour += dt.timedelta(hours=1)
    return found

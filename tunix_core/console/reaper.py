"""Ends processes that outlived their DAG run, and only those that certainly did."""

from __future__ import annotations

from collections.abc import Iterable

from tunix_core.console.airflow_client import TERMINAL_STATES, AirflowClient, AirflowError
from tunix_core.errors import TunixError
from tunix_core.storage import control, process_table
from tunix_core.storage.run_directory import list_runs, read_run
from tunix_core.storage.store import join_uri, normalize_uri, open_store


def runs_with_processes(roots: Iterable[str]) -> list[str]:
    """URIs of the runs under these roots that have a process which may still run."""
    found = []
    for root in roots:
        for name in list_runs(root):
            uri = join_uri(normalize_uri(root), name)
            records = control.read_processes(open_store(uri)).values()
            if not all(process_table.is_gone(record) for record in records):
                found.append(uri)
    return found


def has_ended(client: AirflowClient, dag_id: str, run_id: str) -> bool:
    """Whether Airflow says that the DAG run is over, or that there is none. Silence is neither."""
    try:
        return client.state(dag_id, run_id) in TERMINAL_STATES
    except AirflowError as error:
        return error.status == 404


def reap_ended_runs(roots: Iterable[str], client: AirflowClient) -> dict[str, dict[str, str]]:
    """Stop the processes of runs whose DAG run has ended or is gone.

    A run that was started without Airflow is left alone.

    Returns:
        Run URI -> process -> how it ended.
    """
    reaped = {}
    for uri in runs_with_processes(roots):
        store = open_store(uri)
        try:
            _, details = read_run(store)
        except TunixError:
            continue  # not a run of this release: none of ours to judge
        dag_id = details.get("dag_id")
        if dag_id is not None and has_ended(client, dag_id, details["run_id"]):
            reaped[uri] = process_table.stop_run(store, reason="its DAG run has ended", source="reaper")
    return reaped

"""DAG `evaluate_trajectories`: what actors did, per policy version, hour by hour."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pendulum
from airflow.sdk import CronDataIntervalTimetable, Param, dag, get_current_context, task
from airflow.sdk.exceptions import AirflowFailException

from plugins.operators import ProcessOperator
from plugins.runs import store_roots

DOC = """
# Evaluation of trajectories

For each closed hour of trajectories, and each run that has some: a table per policy version of
rewards, success, turns, tool calls and tokens, under `evaluations/trajectories/` of the run. It reads
the shards alone, so any past hour can be evaluated at any time, and evaluating an hour again with
the same shards changes nothing.

Fill past hours, and evaluate them again with a newer evaluator:

    airflow backfill create --dag-id evaluate_trajectories --from-date 2026-11-30T00:00 \\
        --to-date 2026-11-30T05:00 --dag-run-conf '{"run": "*"}' [--reprocess-behavior completed]

## When it goes red

The red entry of **evaluate** names the run. Its log ends with the process's own lines. Broken shards
do not turn it red: they are counted in the evaluation's manifest. Clear the task once mended.
"""

START = "{{ data_interval_start.isoformat() }}"
END = "{{ data_interval_end.isoformat() }}"


@dag(
    dag_id="evaluate_trajectories",
    # A plain cron string would give intervals of zero length.
    schedule=CronDataIntervalTimetable("0 * * * *", timezone="UTC"),
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    max_active_runs=4,
    params={
        "run": Param(
            "*", type="string", title="Run", description="Name of a run directory under the store; *: every one."
        ),
        "store_root": Param(store_roots()[0], type="string", enum=store_roots(), title="Store"),
    },
    doc_md=DOC,
    tags=["tunix"],
)
def evaluate_trajectories() -> None:
    @task(retries=2, retry_delay=timedelta(seconds=10))
    def find_runs() -> list[str]:
        """URIs of the runs with trajectories of the interval."""
        from plugins.preparation import runs_to_evaluate
        from tunix_core.errors import ConfigError

        context: Any = get_current_context()
        params = context["params"]
        try:
            return runs_to_evaluate(
                params["store_root"], params["run"], context["data_interval_start"], context["data_interval_end"]
            )
        except ConfigError as error:
            raise AirflowFailException(str(error)) from error

    ProcessOperator.partial(
        task_id="evaluate",
        process="evaluate-{{ data_interval_start.strftime('%Y%m%d%H%M') }}",
        module="tasks.evaluate",
        arguments=["trajectories", "--start", START, "--end", END],
        follows_end=True,
        needs="nothing",
        map_index_template="{{ task.run_uri.rsplit('/', 1)[-1] }}",
        max_active_tis_per_dag=4,
        retries=2,
        retry_delay=timedelta(seconds=10),
    ).expand(run_uri=find_runs())


evaluate_trajectories()

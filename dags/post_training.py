"""DAG `post_training`: one run of decoupled agentic-RL post-training, from warm start to report."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pendulum
from airflow.sdk import Param, dag, get_current_context, setup, task, teardown
from airflow.sdk.exceptions import AirflowFailException

from plugins.assets import POLICY
from plugins.operators import ProcessOperator
from plugins.runs import config_overrides, store_roots
from tunix_core.config_loading import recipe_names

DOC = """
# Post-training

One run: a supervised **warm start** makes policy version 0; then **actors** generate trajectories,
the **learner** trains on them, **sync_weights** publishes policy versions and **checkpoint**
verifies and retains checkpoints, all at once; **finalize** evaluates the first and the last version
on held-out tasks and writes the report. The components are processes of their own that meet in the
run directory: with all of Airflow down, learning goes on. Open a running task's log to watch it.

Fields of the form that are left empty keep the recipe's value. `overrides` sets any other option,
as `{"section.field": value}`. A run's resolved configuration is `run.json` in its directory.

## When it goes red

1. Open the log of the red task nearest to the start. Its last lines are the end of the process's own
   log (`logs/<process>.log` in the run directory has more) and the reason.
2. **"another attempt would end the same way"**: the configuration (exit code 64), the data (65) or
   the training (76, diverged) is at fault. Mend it and trigger a new run.
3. **Out of retries**: the process kept crashing. Look for memory (`killed by SIGKILL`) or the store
   (74). Once mended, *clear* the DAG run's failed tasks and every **actors** entry with them: the run
   goes on from its last checkpoint, with the configuration it had.
4. **stop_processes** is red whenever the run did not reach its goal and says why; it also is what
   ends every process of a failed or cancelled run. To cancel, mark the DAG run as failed.
5. A red **actors** entry alone does not end the run while `actor.min_actors` are left.

Killed processes are no failures: they come back by themselves, up to the retries.
"""

FIELDS = {
    "seed": "seed",
    "num_steps": "learner.num_steps",
    "num_actor_groups": "actor.num_groups",
    "replicas": "actor.replicas",
    "max_staleness": "staleness.max_staleness",
    "learning_rate": "optimizer.learning_rate",
    "latency_mean_seconds": "environment.latency_mean_seconds",
}
"""Field of the form -> option of the configuration."""


def optional(kind: str, title: str, description: str, **limits: Any) -> Param:
    """A field that may stay empty; the recipe's value holds then."""
    text = f"{description} Empty: the recipe's."
    return Param(None, type=["null", kind], title=title, description=text, section="Training", **limits)


PARAMS = {
    "recipe": Param(
        "lookup", type="string", enum=recipe_names(), title="Recipe", description="What is trained, and on what task."
    ),
    "seed": Param(0, type="integer", minimum=0, maximum=2**31 - 1, title="Seed", description="Of everything random."),
    "num_steps": optional("integer", "Steps", "Batches to train on.", minimum=1),
    "learning_rate": optional("number", "Learning rate", "Of the optimizer.", exclusiveMinimum=0, maximum=1),
    "max_staleness": optional(
        "integer",
        "Maximum staleness",
        "Trajectories older than so many steps are never trained on.",
        minimum=0,
        maximum=1000,
    ),
    "latency_mean_seconds": optional(
        "number", "Tool latency (s)", "Mean injected latency of a tool call.", minimum=0, maximum=3600
    ),
    "num_actor_groups": optional("integer", "Actor groups", "Each is a task of its own.", minimum=1, maximum=64),
    "replicas": optional("integer", "Replicas", "Actor processes per group.", minimum=1, maximum=64),
    "overrides": Param(
        {},
        type="object",
        title="Further options",
        description='Any option of the configuration: {"section.field": value}.',
        section="Advanced",
    ),
    "store_root": Param(
        store_roots()[0],
        type="string",
        enum=store_roots(),
        title="Store",
        description="Configured root under which the run directory is made.",
        section="Advanced",
    ),
}

RETRIES: dict[str, Any] = {"retries": 3, "retry_delay": timedelta(seconds=5)}
COMPONENT: dict[str, Any] = {"siblings": ["learner", "actors", "sync_weights", "checkpoint"], **RETRIES}


@dag(
    dag_id="post_training",
    schedule=os.environ.get("TUNIX_POST_TRAINING_SCHEDULE") or None,
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    max_active_runs=4,
    params=PARAMS,
    render_template_as_native_obj=False,
    doc_md=DOC,
    tags=["tunix"],
)
def post_training() -> None:
    @setup
    @task(retries=1, retry_delay=timedelta(seconds=5))
    def prepare() -> str:
        """Resolve the configuration and create the run directory; returns its URI."""
        from plugins.preparation import open_run
        from tunix_core.errors import ConfigError

        context = get_current_context()
        params = context["params"]
        try:
            return open_run(
                params["store_root"],
                context["dag"].dag_id,
                context["run_id"],
                params["recipe"],
                config_overrides(params, FIELDS),
            )
        except ConfigError as error:
            raise AirflowFailException(str(error)) from error

    @task(retries=2, retry_delay=timedelta(seconds=5))
    def list_actors(run_uri: str) -> list[str]:
        """One entry per actor group; each becomes a task."""
        from plugins.preparation import actor_processes

        return actor_processes(run_uri)

    run_uri = prepare()
    actor_names = list_actors(run_uri)

    warm_start = ProcessOperator(
        task_id="warm_start", run_uri=run_uri, process="warm_start", module="tasks.warm_start", place="alone", **RETRIES
    )
    learner = ProcessOperator(
        task_id="learner", run_uri=run_uri, process="learner", module="tasks.run_learner", place="learner", **COMPONENT
    )
    actors = ProcessOperator.partial(
        task_id="actors",
        run_uri=run_uri,
        module="tasks.run_actor",
        pooled=True,
        place="actor",
        needs="pool",
        map_index_template="{{ task.process }}",
        **COMPONENT,
    ).expand(process=actor_names)
    sync_weights = ProcessOperator(
        task_id="sync_weights",
        run_uri=run_uri,
        process="sync_weights",
        module="tasks.sync_weights",
        outlets=[POLICY],
        **COMPONENT,
    )
    checkpoint = ProcessOperator(
        task_id="checkpoint", run_uri=run_uri, process="checkpoint", module="tasks.checkpoint", **COMPONENT
    )
    finalize = ProcessOperator(
        task_id="finalize",
        # Not the XComArg: a setup's own successors may have no other trigger rule than the default.
        run_uri="{{ ti.xcom_pull(task_ids='prepare') }}",
        process="finalize",
        module="tasks.finalize",
        follows_end=True,
        needs="nothing",
        outlets=[POLICY],
        # Evaluates and reports what there is, also when a component has failed.
        trigger_rule="all_done_min_one_success",
        retries=1,
        retry_delay=timedelta(seconds=5),
    )

    @teardown(on_failure_fail_dagrun=True)
    @task(retries=2, retry_delay=timedelta(seconds=5))
    def stop_processes(run_uri: str) -> None:
        """End what is left of the run, however it ended, and give the DAG run its outcome.

        The outcome has to be decided here: Airflow takes it from the last tasks, and when a person
        marks a run as failed, a pending `finalize` is skipped, which counts as success.
        """
        from plugins.preparation import close_run, why_unsuccessful

        ti = get_current_context()["ti"]
        close_run(run_uri, source=ti.task_id)
        states = ti.get_task_states(dag_id=ti.dag_id, run_ids=[ti.run_id])[ti.run_id]
        reason = why_unsuccessful(run_uri, states, ["learner", "sync_weights", "checkpoint", "finalize"])
        if reason:
            raise AirflowFailException(f"the run did not reach its goal: {reason}")

    stopped = stop_processes(run_uri)
    components = [actors, learner, sync_weights, checkpoint]
    # Without actors the others would wait for ever, so they do not start before the list is there.
    for component in components:
        [warm_start, actor_names] >> component >> finalize
    warm_start >> finalize >> stopped
    components >> stopped


post_training()

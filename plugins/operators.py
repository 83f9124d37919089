"""The operator that runs one component of a run as a detached, supervised process."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from airflow.sdk import BaseOperator, BaseOperatorLink, conf
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferralError, TaskDeferralTimeout

from plugins.runs import store_roots
from plugins.triggers import ProcessTrigger
from tunix_core.errors import ConfigError, TunixError, is_retryable

if TYPE_CHECKING:
    from airflow.sdk import Context

    from plugins.launchers import LaunchSpec, Submission
    from tunix_core.storage.store import ObjectStore

GONE_STATES = ("failed", "upstream_failed", "skipped", "removed")


class ReportLink(BaseOperatorLink):
    """From a task to the page of its run."""

    name = "Run report"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002
        from urllib.parse import quote

        base = conf.get("api", "base_url", fallback="").rstrip("/")
        return f"{base}/tunix/report?dag_id={quote(ti_key.dag_id, safe='')}&run_id={quote(ti_key.run_id, safe='')}"


class ProcessOperator(BaseOperator):
    """Launch a process, or re-attach to it, and defer until it has ended.

    The worker is needed for seconds at the start and at the end only; scheduler, api-server,
    triggerer and worker may all go away in between. A retry of a crashed attempt starts the next
    attempt of the same submission; when the process outlived whatever made Airflow retry, it is
    attached to again. Clearing the task makes a new submission, before which the old one is stopped.

    A worker that is told to end (`on_kill`) leaves the process alone: that happens to workers for
    many reasons. A person's mark or clear reaches it through the trigger (see there), and what is
    left at the end of the DAG run is stopped by the teardown.

    Args:
        run_uri: the run directory; must lie under TUNIX_STORE_ROOTS.
        process: its name in the run.
        module: the entry point, `tasks.…`; not templated, so params never name code.
        arguments: appended to `--run URI`.
        pooled: run `actor.replicas` of it, restarted in place within `actor.max_restarts`.
        place: whose CPUs and priority in the run's launcher configuration it has; `alone`: all of the machine's.
        follows_end: it works after the run's stop object, and does not obey it.
        needs: `run`: its terminal failure stops the run; `pool`: only when fewer than
            `actor.min_actors` are left; `nothing`: it is no part of the run's life.
        siblings: ids of the tasks whose end is the run's end, see `ProcessTrigger`.
        timeout: how long it may take; past it the attempt fails and the process is stopped.
    """

    template_fields: Sequence[str] = ("run_uri", "process", "arguments")
    operator_extra_links = (ReportLink(),)
    ui_color = "#e8f0fe"

    def __init__(
        self,
        *,
        run_uri: str,
        process: str,
        module: str,
        arguments: Sequence[str] = (),
        pooled: bool = False,
        place: Literal["learner", "actor", "other", "alone"] = "other",
        follows_end: bool = False,
        needs: Literal["run", "pool", "nothing"] = "run",
        siblings: Sequence[str] = (),
        timeout: timedelta | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if needs not in ("run", "pool", "nothing") or place not in ("learner", "actor", "other", "alone"):
            accepted = "run, pool, nothing; learner, actor, other, alone"
            raise ConfigError("needs, place", (needs, place), accepted, "Choose one of each.")
        self.run_uri = run_uri
        self.process = process
        self.module = module
        self.arguments = list(arguments)
        self.pooled = pooled
        self.place = place
        self.follows_end = follows_end
        self.needs = needs
        self.siblings = list(siblings)
        self.timeout = timeout

    # ------------------------------------------------------------------ start

    def execute(self, context: Context) -> dict[str, Any]:
        from plugins.launchers import LocalLauncher

        try:
            spec = self._spec(context)
            submission = LocalLauncher().submit(spec)
        except TunixError as error:
            self._fail(context, f"{self.process} was not started: {error}", retryable=error.retryable)
        self._announce(submission)
        if submission.record.state == "exited":  # an earlier attempt of this submission succeeded
            return self.resume(context, {"state": "succeeded", "exit_code": 0, "reason": submission.record.reason})
        return self._wait(spec, submission.record.attempt)

    def _wait(self, spec: LaunchSpec, attempt: int) -> NoReturn:
        trigger = ProcessTrigger(
            run_uri=spec.run_uri,
            process=spec.process,
            submission_key=spec.submission_key,
            attempt=attempt,
            heartbeats=spec.heartbeat_names,
            ends_run=self.needs == "run",
            siblings=[task for task in self.siblings if task != self.task_id],
        )
        self.defer(trigger=trigger, method_name="resume", kwargs={"attempt": attempt}, timeout=self.timeout)

    def _spec(self, context: Context) -> LaunchSpec:
        from plugins.launchers import LaunchSpec
        from tunix_core.storage.run_directory import read_run

        config, _ = read_run(self._store())
        launcher = config.launcher
        cpus = {"learner": launcher.learner_cpus, "actor": launcher.actor_cpus, "other": launcher.other_cpus}
        return LaunchSpec(
            run_uri=self.run_uri,
            process=self.process,
            submission_key=submission_key(context["ti"]),
            module=self.module,
            arguments=tuple(self.arguments),
            replicas=config.actor.replicas if self.pooled else 0,
            restarts=config.actor.max_restarts if self.pooled else 0,
            cpus=cpus.get(self.place, ()),
            idle=launcher.idle_actors and self.place == "actor",
            ignore_stop=self.follows_end,
        )

    def _announce(self, submission: Submission) -> None:
        record = submission.record
        verb = "started" if submission.started else "re-attached to"
        self.log.info("%s %s, attempt %d, on %s; run %s", verb, self.process, record.attempt, record.host, self.run_uri)

    def _store(self) -> ObjectStore:
        from tunix_core.storage.store import open_store

        return open_store(self.run_uri, roots=store_roots())

    # -------------------------------------------------------------------- end

    def resume(self, context: Context, event: dict[str, Any], attempt: int = 0) -> dict[str, Any]:
        """The trigger fired: succeed, or fail for good or for another try."""
        if event["state"] == "abandoned":
            from tunix_core.storage import control

            self.log.warning("ending the run: %s", event["reason"])
            control.request_stop(self._store(), reason=event["reason"], source=self.process, failed=event["failed"])
            self._wait(self._spec(context), attempt)  # the process sees the stop and ends
        if event["state"] != "succeeded":
            message = f"{self.process} {event['state']}: {event['reason']}"
            self._show_log_tail()
            self._fail(context, message, retryable=is_retryable(event["exit_code"]))
        self.log.info("%s has completed", self.process)
        result = {"run_uri": self.run_uri, "process": self.process}
        if self.outlets:
            result |= self._release(context)
        return result

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """As the base class; a time-out or a lost trigger is this attempt's failure too."""
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except TaskDeferralTimeout:
            from tunix_core.storage import process_table

            reason = f"it took longer than {self.timeout}"
            process_table.stop_process(self._store(), self.process, reason=reason)
            self._fail(context, f"{self.process} was stopped: {reason}", retryable=True)
        except TaskDeferralError as error:
            self._fail(context, f"the trigger of {self.process} failed: {error}", retryable=True)

    def _fail(self, context: Context, message: str, *, retryable: bool) -> NoReturn:
        """Raise what makes Airflow retry or give up; giving up ends the run, so that siblings end.

        The stop object is written here and not in a failure callback: those run in the DAG
        processor, later, if it lives.
        """
        from tunix_core.storage import control

        ti = context["ti"]
        store = self._store()
        stop = None if self.needs == "nothing" else control.read_stop(store)
        if stop is not None and stop.failed and not self.follows_end:
            raise AirflowFailException(f"{message} (the run is ending: {stop.reason})")
        last = not retryable or ti.try_number > ti.max_tries
        if last and (self.needs == "run" or (self.needs == "pool" and not self._enough_without(context))):
            control.request_stop(store, reason=message[:1000], source=self.process, failed=True)
        if not retryable:
            raise AirflowFailException(f"{message} (another attempt would end the same way)")
        raise AirflowException(message)

    def _enough_without(self, context: Context) -> bool:
        """Whether the pool still has `actor.min_actors` once this group is gone for good."""
        from tunix_core.storage.run_directory import read_run

        ti = context["ti"]
        config, _ = read_run(self._store())
        states = ti.get_task_states(dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id])[ti.run_id]
        mine = f"{ti.task_id}_{ti.map_index}"
        left = sum(1 for key, state in states.items() if key != mine and str(state) not in GONE_STATES)
        self.log.info("%d actor groups are left without %s", left, self.process)
        return left * config.actor.replicas >= config.actor.min_actors

    def _show_log_tail(self, num_lines: int = 30) -> None:
        """The end of the process's own log, where a person looks first."""
        from tunix_core import paths
        from tunix_core.errors import ObjectMissing

        names = [self.process, f"{self.process}-0"]
        for name in names:
            try:
                lines = self._store().get(paths.log(name)).decode(errors="replace").splitlines()
            except ObjectMissing:
                continue
            self.log.info("end of %s:\n%s", paths.log(name), "\n".join(lines[-num_lines:]))

    def _release(self, context: Context) -> dict[str, Any]:
        """Tell Airflow's assets which policy version the run has released last."""
        from tunix_core.storage.policies import PolicyStore

        current = PolicyStore(self._store()).current()
        if current is None:
            return {}
        released: dict[str, Any] = {"run_uri": self.run_uri, "version": current.version, "released_by": self.process}
        for outlet in self.outlets:
            context["outlet_events"][outlet].extra = released
        self.log.info("released policy version %d", current.version)
        return {"version": current.version}


def submission_key(ti: Any) -> str:
    """Names the work of a task instance: the same for its retries, another once a person cleared it.

    Airflow raises `max_tries` above the retries of the task by the tries made before each clear,
    so their difference numbers the clears.
    """
    generation = ti.max_tries - (ti.task.retries or 0)
    return f"{ti.dag_id}/{ti.run_id}/{ti.task_id}/{ti.map_index}/g{generation}"

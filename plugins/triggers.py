"""Waits for the end of a supervised process. It only reads the run directory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from plugins.runs import format_progress, store_roots

ENDED_STATES = ("success", "failed", "upstream_failed", "skipped", "removed")


class ProcessTrigger(BaseTrigger):
    """Fires when the watched attempt at a process has ended, or was lost or superseded.

    The event carries `state` (succeeded, failed, lost, superseded), `exit_code` and `reason`.
    Meanwhile it logs the process's progress, which the UI shows live.

    It fires `abandoned` too, when Airflow says that a sibling task is gone for good and yet no one has
    asked the run to end: a worker that is killed, or a task marked by a person in the seconds
    between two deferrals, ends without a word, and this process would wait for it for ever.

    Args:
        run_uri: the run directory; must lie under the configured roots.
        process: whose record is read.
        submission_key: of the submission that is watched.
        attempt: of that submission's attempt.
        heartbeats: names under which the process (or each replica) reports progress.
        ends_run: whether the run cannot go on without this process.
        siblings: ids of the tasks that this process cannot do without.
        poll_seconds: between two looks.
        log_seconds: at least so long between two progress lines of one process.
    """

    def __init__(
        self,
        *,
        run_uri: str,
        process: str,
        submission_key: str,
        attempt: int,
        heartbeats: Sequence[str],
        ends_run: bool,
        siblings: Sequence[str] = (),
        poll_seconds: float = 1.0,
        log_seconds: float = 10.0,
        sibling_seconds: float = 20.0,
    ) -> None:
        super().__init__()
        self.run_uri = run_uri
        self.process = process
        self.submission_key = submission_key
        self.attempt = attempt
        self.heartbeats = list(heartbeats)
        self.ends_run = ends_run
        self.siblings = list(siblings)
        self.poll_seconds = poll_seconds
        self.log_seconds = log_seconds
        self.sibling_seconds = sibling_seconds

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            "plugins.triggers.ProcessTrigger",
            {
                "run_uri": self.run_uri,
                "process": self.process,
                "submission_key": self.submission_key,
                "attempt": self.attempt,
                "heartbeats": self.heartbeats,
                "ends_run": self.ends_run,
                "siblings": self.siblings,
                "poll_seconds": self.poll_seconds,
                "log_seconds": self.log_seconds,
                "sibling_seconds": self.sibling_seconds,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        from tunix_core.errors import TunixError
        from tunix_core.storage.process_table import ProcessObserver
        from tunix_core.storage.store import open_store

        store = await asyncio.to_thread(open_store, self.run_uri, roots=store_roots())
        observer = ProcessObserver(store, self.process)
        logged: dict[str, str] = {}
        next_log = 0.0
        next_siblings = time.monotonic() + self.sibling_seconds
        reachable = True
        self.log.info("watching %s, attempt %d, in %s", self.process, self.attempt, self.run_uri)
        while True:
            try:
                if time.monotonic() >= next_log:
                    next_log = time.monotonic() + self.log_seconds
                    await asyncio.to_thread(self._log_progress, store, logged)
                event = await asyncio.to_thread(self._look, observer)
                if event is None and self.siblings and time.monotonic() >= next_siblings:
                    next_siblings = time.monotonic() + self.sibling_seconds
                    event = await asyncio.to_thread(self._look_at_siblings, store)
                if event is not None:
                    await asyncio.to_thread(self._log_progress, store, logged)
                    yield TriggerEvent(event)
                    return
                reachable = True
            except (TunixError, OSError) as error:
                # Not knowing is no news: the process works on, and so does this.
                if reachable:
                    self.log.warning("cannot read the run directory: %s", error)
                reachable = False
            await asyncio.sleep(self.poll_seconds)

    def _look(self, observer: Any) -> dict[str, Any] | None:
        """The event, once there is one."""
        status = observer.status()
        record = status.record
        if record is not None and (record.submission_key, record.attempt) != (self.submission_key, self.attempt):
            reason = f"attempt {record.attempt} of submission {record.submission_key} has taken over"
            return {"state": "superseded", "exit_code": None, "reason": reason}
        if status.state == "running":
            return None
        state = "lost" if status.state == "absent" else status.state
        exit_code = None if state == "lost" else status.exit_code
        return {"state": state, "exit_code": exit_code, "reason": status.reason}

    def _look_at_siblings(self, store: Any) -> dict[str, Any] | None:
        """`abandoned`, if a sibling is gone and nothing tells this process to end."""
        from tunix_core.storage.control import read_stop

        if read_stop(store) is not None:
            return None
        try:
            states = self._task_states(self.siblings)
        except Exception as error:
            self.log.debug("the state of the sibling tasks is unknown: %s", error)
            return None
        for task in self.siblings:
            own = [state for key, state in states.items() if key == task or key.rpartition("_")[0] == task]
            if own and all(state in ENDED_STATES for state in own) and read_stop(store) is None:
                reason = f"task {task} is {own[0]}, and no one has asked the run to end"
                failed = any(state != "success" for state in own)
                return {"state": "abandoned", "exit_code": None, "reason": reason, "failed": failed}
        return None

    def _log_progress(self, store: Any, logged: dict[str, str]) -> None:
        from tunix_core.storage.control import read_heartbeat

        for name in self.heartbeats:
            beat = read_heartbeat(store, name)
            line = "" if beat is None else format_progress(beat.progress)
            if line and logged.get(name) != line:
                logged[name] = line
                self.log.info("%s", line if len(self.heartbeats) == 1 else f"{name}: {line}")

    # ------------------------------------------------------------------- kill

    async def on_kill(self) -> None:
        """A person acted on the deferred task: stop the process, once Airflow confirms that.

        Airflow also cancels triggers this way when another triggerer took them over. So the task
        instance's state is asked for first: the process is stopped only if the API answers that
        the attempt is no longer deferred. Without an answer nothing is stopped here; the DAG's
        teardown and the reaper come later.
        """
        try:
            state = await asyncio.to_thread(self._task_state)
        except Exception as error:
            self.log.warning("%s is left running: its task's state is unknown (%s)", self.process, error)
            return
        if state == "deferred":
            self.log.info("%s is left running: its task is still deferred, another triggerer has it", self.process)
            return
        self.log.info("stopping %s: its task is %s now", self.process, state or "cleared")
        await asyncio.to_thread(self._stop, state)

    def _task_state(self) -> str | None:
        """State of the task instance this trigger belongs to; None: cleared or gone."""
        ti = self.task_instance
        if ti is None:
            raise RuntimeError("the trigger belongs to no task instance")
        key = ti.task_id if ti.map_index < 0 else f"{ti.task_id}_{ti.map_index}"
        return self._task_states([ti.task_id]).get(key)

    def _task_states(self, task_ids: list[str]) -> dict[str, str | None]:
        """Task (a mapped one with `_<map index>`) -> its state in this DAG run, by Airflow's API.

        Raises:
            Exception: no answer; of what kind is Airflow's affair.
        """
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

        ti = self.task_instance
        if ti is None:
            raise RuntimeError("the trigger belongs to no task instance")
        states = RuntimeTaskInstance.get_task_states(dag_id=ti.dag_id, task_ids=task_ids, run_ids=[ti.run_id])
        found = states.get(ti.run_id, {})
        return {key: None if state is None else str(getattr(state, "value", state)) for key, state in found.items()}

    def _stop(self, task_state: str | None) -> None:
        from tunix_core.storage import control, process_table
        from tunix_core.storage.store import open_store

        store = open_store(self.run_uri, roots=store_roots())
        reason = f"the task of {self.process} was set to {task_state or 'cleared'} by a person"
        if self.ends_run and task_state in ("failed", "success", "skipped"):
            # It will not come back, so its siblings would wait for ever.
            control.request_stop(store, reason=reason, source=self.process, failed=task_state == "failed")
        process_table.stop_process(store, self.process, reason=reason, submission_key=self.submission_key)

"""Airflow's public REST API, as far as the console needs it. Standard library only."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from tunix_core.errors import TunixError

TERMINAL_STATES = ("success", "failed")


class AirflowError(TunixError):
    """The API refused a request (`status` is its HTTP status) or was not reached (status 0)."""

    retryable = True

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class AirflowClient:
    """A person's session with the API; asks for a new token when the old one is refused."""

    def __init__(self, base_url: str, user: str, password: str, *, timeout_seconds: float = 10.0) -> None:
        self.base_url = base_url.rstrip("/")
        self._user = user
        self._password = password
        self._timeout_seconds = timeout_seconds
        self._token = ""

    # -------------------------------------------------------------- transport

    def _send(self, method: str, path: str, body: Any, headers: dict[str, str]) -> bytes:
        request = urllib.request.Request(
            self.base_url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **headers},
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_seconds) as response:
                return bytes(response.read())
        except urllib.error.HTTPError as error:
            with error:
                detail = error.read().decode(errors="replace")[:500]
            raise AirflowError(f"{method} {path}: HTTP {error.code}: {detail}", error.code) from None
        except OSError as error:  # URLError, time-outs and refused connections among them
            raise AirflowError(f"{method} {path}: Airflow at {self.base_url} does not answer ({error})") from error

    def _login(self) -> str:
        body = {"username": self._user, "password": self._password}
        return str(json.loads(self._send("POST", "/auth/token", body, {}))["access_token"])

    def request(self, method: str, path: str, body: Any = None, *, accept: str = "application/json") -> Any:
        """One call with the token; decoded JSON, or None for an empty answer.

        Raises:
            AirflowError: refused, or not reached.
        """
        for attempt in (1, 2):
            self._token = self._token or self._login()
            headers = {"Authorization": f"Bearer {self._token}", "Accept": accept}
            try:
                answer = self._send(method, path, body, headers)
            except AirflowError as error:
                if error.status == 401 and attempt == 1:
                    self._token = ""
                    continue
                raise
            return json.loads(answer) if answer else None
        raise AssertionError("unreachable")

    # ----------------------------------------------------------------- health

    def health(self) -> dict[str, str]:
        """Status of `metadatabase`, `scheduler`, `triggerer` and `dag_processor`; needs no token."""
        answer = json.loads(self._send("GET", "/api/v2/monitor/health", None, {}))
        return {part: str(value["status"]) for part, value in answer.items() if value}

    # ------------------------------------------------------------------- DAGs

    @staticmethod
    def _quote(name: str) -> str:
        return urllib.parse.quote(name, safe="")

    def dag_ids(self) -> list[str]:
        return [dag["dag_id"] for dag in self.request("GET", "/api/v2/dags?limit=100")["dags"]]

    def import_errors(self) -> list[str]:
        """Stack traces of DAG files that do not load."""
        return [e["stack_trace"] for e in self.request("GET", "/api/v2/importErrors")["import_errors"]]

    def wait_for_dag(self, dag_id: str, timeout_seconds: float = 60.0) -> None:
        """Return once the DAG is known.

        Raises:
            AirflowError: not in time; carries the import errors.
        """
        deadline = time.monotonic() + timeout_seconds
        while dag_id not in self.dag_ids():
            if time.monotonic() > deadline:
                errors = "\n".join(self.import_errors()) or "no import errors"
                raise AirflowError(f"DAG {dag_id!r} is unknown after {timeout_seconds:g} s; {errors}", 404)
            time.sleep(0.5)

    def unpause(self, dag_id: str, *, paused: bool = False) -> None:
        self.request("PATCH", f"/api/v2/dags/{self._quote(dag_id)}?update_mask=is_paused", {"is_paused": paused})

    # ------------------------------------------------------------------- runs

    def _run_path(self, dag_id: str, run_id: str) -> str:
        return f"/api/v2/dags/{self._quote(dag_id)}/dagRuns/{self._quote(run_id)}"

    def trigger(self, dag_id: str, conf: dict[str, Any] | None = None, *, run_id: str | None = None) -> str:
        """Start a DAG run; `conf` overrides its params. Returns the run id."""
        body: dict[str, Any] = {"logical_date": None, "conf": conf or {}}
        if run_id is not None:
            body["dag_run_id"] = run_id
        answer = self.request("POST", f"/api/v2/dags/{self._quote(dag_id)}/dagRuns", body)
        return str(answer["dag_run_id"])

    def dag_run(self, dag_id: str, run_id: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.request("GET", self._run_path(dag_id, run_id))
        return answer

    def state(self, dag_id: str, run_id: str) -> str:
        """queued, running, success or failed."""
        return str(self.dag_run(dag_id, run_id)["state"])

    def mark(self, dag_id: str, run_id: str, state: str) -> None:
        """What a person does with "mark run as failed" (or success)."""
        self.request("PATCH", f"{self._run_path(dag_id, run_id)}?update_mask=state", {"state": state})

    def wait_for_run(self, dag_id: str, run_id: str, timeout_seconds: float) -> str:
        """Wait for the end of a run, through times in which the API does not answer.

        Raises:
            AirflowError: not in time.
        """
        deadline = time.monotonic() + timeout_seconds
        state = "unknown"
        while time.monotonic() < deadline:
            try:
                state = self.state(dag_id, run_id)
            except AirflowError as error:
                if error.status not in (0, 500, 502, 503):
                    raise
            if state in TERMINAL_STATES:
                return state
            time.sleep(0.5)
        raise AirflowError(f"run {run_id!r} of {dag_id!r} is {state} after {timeout_seconds:g} s")

    def task_instances(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        """Each with `task_id`, `map_index`, `state`, `try_number`, `rendered_map_index`, ids and dates."""
        path = f"{self._run_path(dag_id, run_id)}/taskInstances?limit=200"
        return list(self.request("GET", path)["task_instances"])

    def task_states(self, dag_id: str, run_id: str) -> dict[tuple[str, int], str | None]:
        """(task id, map index) -> state."""
        return {(t["task_id"], t["map_index"]): t["state"] for t in self.task_instances(dag_id, run_id)}

    def clear(self, dag_id: str, run_id: str, task_ids: list[str], **options: Any) -> None:
        """What a person does with "clear": the tasks run again, their downstream too by default."""
        body = {"dry_run": False, "dag_run_id": run_id, "task_ids": task_ids, "only_failed": False, **options}
        body = {"include_downstream": True, "reset_dag_runs": True, **body}
        self.request("POST", f"/api/v2/dags/{self._quote(dag_id)}/clearTaskInstances", body)

    def logs(self, dag_id: str, run_id: str, task_id: str, *, try_number: int = 1, map_index: int = -1) -> list[str]:
        """Lines of one attempt's log, the trigger's included, as the UI shows them."""
        path = (
            f"{self._run_path(dag_id, run_id)}/taskInstances/{self._quote(task_id)}/logs/{try_number}"
            f"?map_index={map_index}&full_content=true"
        )
        lines = []
        for line in self.request("GET", path)["content"]:
            lines.append(line["event"] if isinstance(line, dict) else str(line))
            for error in (line.get("error_detail") or []) if isinstance(line, dict) else []:
                lines.append(f"{error['exc_type']}: {error['exc_value']}")
        return lines

    def asset_events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Asset events, newest first, each with `extra` and the run it came from."""
        events = list(self.request("GET", "/api/v2/assets/events?order_by=-timestamp&limit=100")["asset_events"])
        return [e for e in events if name is None or e.get("name") == name]

    def backfills(self, dag_id: str) -> list[dict[str, Any]]:
        return list(self.request("GET", f"/api/v2/backfills?dag_id={self._quote(dag_id)}")["backfills"])

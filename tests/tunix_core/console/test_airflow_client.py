"""The client against a scripted API."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tunix_core.console.airflow_client import AirflowClient, AirflowError


class Api(http.server.ThreadingHTTPServer):
    """Answers from `answers`: (method, path) -> list of (status, body), the last one for ever."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[tuple[str, str], list[tuple[int, Any]]] = {}
        self.requests: list[tuple[str, str, Any, str]] = []
        self.tokens = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Api

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        sent = json.loads(body) if body else None
        self.server.requests.append((self.command, self.path, sent, self.headers.get("Authorization", "")))
        if self.path == "/auth/token":
            self.server.tokens += 1
            status, value = 201, {"access_token": f"token{self.server.tokens}"}
        else:
            script = self.server.answers.get((self.command, self.path), [(404, {"detail": "not found"})])
            status, value = script.pop(0) if len(script) > 1 else script[0]
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PATCH = answer  # http.server's names

    def log_message(self, *values: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def api() -> Iterator[Api]:
    with Api() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def client(api: Api) -> AirflowClient:
    return AirflowClient(api.url, "admin", "secret")


RUN = "manual__2026-11-30T05:00:00+00:00"
RUN_PATH = "/api/v2/dags/post_training/dagRuns/manual__2026-11-30T05%3A00%3A00%2B00%3A00"


def test_run_ids_are_quoted_and_one_token_serves(api: Api, client: AirflowClient) -> None:
    api.answers["GET", RUN_PATH] = [(200, {"state": "running"})]
    assert client.state("post_training", RUN) == "running"
    assert client.state("post_training", RUN) == "running"
    assert api.tokens == 1
    assert api.requests[0][2] == {"username": "admin", "password": "secret"}
    assert api.requests[1][3] == "Bearer token1"


def test_an_expired_token_is_renewed_once(api: Api, client: AirflowClient) -> None:
    api.answers["GET", RUN_PATH] = [(401, {}), (200, {"state": "success"})]
    assert client.state("post_training", RUN) == "success"
    assert api.tokens == 2
    api.answers["GET", RUN_PATH] = [(401, {})]
    with pytest.raises(AirflowError) as refused:
        client.state("post_training", RUN)
    assert refused.value.status == 401


def test_triggering_passes_params_and_no_date(api: Api, client: AirflowClient) -> None:
    api.answers["POST", "/api/v2/dags/post_training/dagRuns"] = [(200, {"dag_run_id": RUN})]
    assert client.trigger("post_training", {"seed": 1}) == RUN
    assert api.requests[-1][2] == {"logical_date": None, "conf": {"seed": 1}}


def test_waiting_outlasts_an_api_that_is_away(api: Api, client: AirflowClient) -> None:
    api.answers["GET", RUN_PATH] = [(503, {}), (200, {"state": "queued"}), (500, {}), (200, {"state": "failed"})]
    assert client.wait_for_run("post_training", RUN, 20) == "failed"
    with pytest.raises(AirflowError, match="not found"):
        client.wait_for_run("post_training", "other", 20)


def test_silence_says_so() -> None:
    client = AirflowClient("http://127.0.0.1:1", "admin", "secret", timeout_seconds=1)
    with pytest.raises(AirflowError, match="does not answer") as silent:
        client.health()
    assert silent.value.status == 0


def test_logs_are_lines_with_their_errors(api: Api, client: AirflowClient) -> None:
    error = {"exc_type": "AirflowException", "exc_value": "learner lost"}
    content = [{"event": "step 1/2"}, "plain", {"event": "Task failed", "error_detail": [error]}]
    path = f"{RUN_PATH}/taskInstances/learner/logs/2?map_index=-1&full_content=true"
    api.answers["GET", path] = [(200, {"content": content})]
    lines = client.logs("post_training", RUN, "learner", try_number=2)
    assert lines == ["step 1/2", "plain", "Task failed", "AirflowException: learner lost"]

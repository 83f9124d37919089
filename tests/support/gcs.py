"""`gs://` for tests: a real fake-gcs-server process on loopback, and a proxy that fails by script."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import threading
from collections.abc import Callable, Iterator

from tunix_core.console.emulator import Emulator, emulator_environment, start_fake_gcs

__all__ = ["Emulator", "FaultyProxy", "emulated_gcs", "environment", "start_fake_gcs"]


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def emulated_gcs(bucket: str = "tunix") -> Iterator[Emulator]:
    """An emulator for the block, with this process's environment pointing at it."""
    emulator = start_fake_gcs(bucket)
    try:
        with environment(emulator.env):
            yield emulator
    finally:
        emulator.stop()


class FaultyProxy:
    """Forwards HTTP to an emulator, except where the script says otherwise.

    `script` receives method and path of each request and returns `pass`, `fail` (503, not forwarded),
    `lose` (forwarded, but answered 503: the caller cannot know that it worked) or `deny` (403).
    """

    def __init__(self, target: str, script: Callable[[str, str], str]) -> None:
        host = target.removeprefix("http://")
        self.requests: list[tuple[str, str, str]] = []
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                action = script(self.command, self.path)
                proxy.requests.append((self.command, self.path, action))
                status, headers, content = 503, [("Content-Type", "text/plain")], b"scripted failure"
                if action == "deny":
                    status = 403
                if action in ("pass", "lose"):
                    connection = http.client.HTTPConnection(host, timeout=30)
                    kept = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection")}
                    connection.request(self.command, self.path, body=body, headers=kept)
                    answer = connection.getresponse()
                    content_received = answer.read()
                    connection.close()
                    if action == "pass":
                        status, content = answer.status, content_received
                        headers = [
                            (k, v)
                            for k, v in answer.getheaders()
                            if k.lower() not in ("transfer-encoding", "content-length", "connection")
                        ]
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_DELETE = do_PUT = handle_any

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.env = emulator_environment(f"http://127.0.0.1:{self._server.server_port}")

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

"""The proxy does what its kinds say; what is proven through it is worth no more than that."""

from __future__ import annotations

import http.client
import http.server
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.fault_proxy import Fault, FaultProxy, FaultRates, SeededFaults
from tests.support.gcs import Emulator, faulty_gcs
from tunix_core.storage.store import open_store


class _Server:
    """Counts what reaches it and echoes the body, `x` * 1000 for a GET."""

    def __init__(self) -> None:
        self.reached: list[str] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"x" * 1000
                outer.reached.append(self.path)
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("X-Number", str(len(outer.reached)))
                self.send_header("Location", f"{outer.url}/next")
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = handle_any

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[_Server]:
    server = _Server()
    yield server
    server.stop()


def ask(proxy: FaultProxy, path: str = "/", body: bytes | None = None) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=20)
    try:
        connection.request("GET" if body is None else "POST", path, body=body)
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


def through(server: _Server, *faults: Fault) -> FaultProxy:
    """A proxy that does this to its requests in turn, and lets the rest pass."""
    waiting = list(faults)
    return FaultProxy(server.url, lambda _method, _path: waiting.pop(0) if waiting else "pass")


def test_what_passes_is_unchanged(server: _Server) -> None:
    proxy = through(server)
    try:
        status, body, headers = ask(proxy, "/a%2Fb%20c?q=%2B", b"\r\n\x00" * 1000)
        assert (status, body) == (200, b"\r\n\x00" * 1000)
        assert headers["Location"] == f"{proxy.url}/next"
        assert server.reached == ["/a%2Fb%20c?q=%2B"]
        assert proxy.requests == [("POST", "/a%2Fb%20c?q=%2B", "pass")]
        assert proxy.num_faults == 0
    finally:
        proxy.stop()


@pytest.mark.parametrize(
    ("fault", "status", "num_reached"),
    [
        ("403", 403, 0),
        ("429", 429, 0),
        ("500", 500, 0),
        ("503", 503, 0),
        ("slow", 200, 1),
        ("delay", 200, 1),
        ("cut", None, 1),
        ("reset", None, 0),
        ("duplicate", 200, 2),
        ("lose", None, 1),
        ("lose_503", 503, 1),
    ],
)
def test_each_fault(server: _Server, fault: Fault, status: int | None, num_reached: int) -> None:
    proxy = through(server, fault)
    try:
        if status is None:
            with pytest.raises(http.client.IncompleteRead if fault == "cut" else ConnectionError) as raised:
                ask(proxy)
            if isinstance(raised.value, http.client.IncompleteRead):
                assert len(raised.value.partial) == 500
        else:
            received, _, headers = ask(proxy)
            assert received == status
            assert headers.get("X-Number") == (str(num_reached) if status == 200 else None)
        assert len(server.reached) == num_reached
        assert (proxy.counts[fault], proxy.num_faults) == (1, 1)
        assert ask(proxy)[0] == 200
    finally:
        proxy.stop()


def test_a_delayed_request_is_overtaken(server: _Server) -> None:
    held = threading.Event()

    def decide(_method: str, path: str) -> Fault:
        if path == "/first":
            held.set()
            return "delay"
        return "pass"

    proxy = FaultProxy(server.url, decide, delay_seconds=60)
    try:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(ask, proxy, "/first")
            assert held.wait(20)
            ask(proxy, "/second")
            assert first.result()[0] == 200
        assert sorted(server.reached) == ["/first", "/second"]
        assert server.reached[0] == "/second"
    finally:
        proxy.stop()


def test_a_seed_repeats_its_faults() -> None:
    rates = FaultRates.each(0.05)
    first, again, other = (SeededFaults(rates, seed=seed) for seed in (7, 7, 8))
    drawn = [[faults("GET", "/") for _ in range(4000)] for faults in (first, again, other)]
    assert drawn[0] == drawn[1] != drawn[2]
    for fault, share in {"pass": 0.65, "slow": 0.05, "503": 0.05 / 3, "lose": 0.025, "duplicate": 0.05}.items():
        assert drawn[0].count(fault) / 4000 == pytest.approx(share, rel=0.35)
    assert drawn[0].count("403") == 0


def test_a_store_behind_it(gcs: Emulator) -> None:
    with faulty_gcs(gcs, FaultRates(error=0.2), seed=1) as faulty:
        store = open_store(f"{faulty.uri}/behind-the-proxy")
        for number in range(10):
            store.put(f"{number}", b"x")
        faulty.faults.rates = FaultRates()
        assert len(store.list_after("")) == 10
        counts = faulty.proxy.counts
        assert counts["pass"] >= 11
        assert counts["429"] + counts["500"] + counts["503"] == faulty.proxy.num_faults > 0

"""An HTTP proxy in front of a storage emulator that does what networks and servers do on bad days.

It serves from a thread of its own, so any process reaches it by its URL. What it does to a request is
decided by a function of method and path: a script of a test, or `SeededFaults`, which draws by rates.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import io
import random
import socket
import struct
import threading
from collections.abc import Callable
from typing import Literal, get_args

import aiohttp
from aiohttp import web
from yarl import URL

Fault = Literal[
    "pass",
    "403", "429", "500", "503",  # answered so, and not carried out
    "slow",  # carried out at once, answered late
    "delay",  # held until another request has overtaken it, then carried out
    "cut",  # carried out; half of the answer, then the connection breaks
    "reset",  # not carried out; the connection breaks
    "duplicate",  # carried out twice; the second answer is given
    "lose",  # carried out; the connection breaks instead of an answer
    "lose_503",  # carried out; answered 503
]  # fmt: skip
"""`403` comes by script only: a client gives up on it at once."""

Decide = Callable[[str, str], Fault]
"""What happens to a request, from its method and its path with the query."""

_ERRORS: tuple[Fault, ...] = ("429", "500", "503")
_LOST: tuple[Fault, ...] = ("lose", "lose_503")
_HOP_BY_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding", "expect"})
_MAX_BODY_BYTES = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultRates:
    """Share of requests that each kind hits; the rest pass."""

    error: float = 0.0
    slow: float = 0.0
    delay: float = 0.0
    cut: float = 0.0
    reset: float = 0.0
    duplicate: float = 0.0
    lose: float = 0.0

    def __post_init__(self) -> None:
        rates = dataclasses.astuple(self)
        assert all(rate >= 0 for rate in rates), self
        assert sum(rates) <= 1, self

    @classmethod
    def each(cls, rate: float) -> FaultRates:
        """Every kind at the same rate."""
        return cls(**{field.name: rate for field in dataclasses.fields(cls)})


class SeededFaults:
    """The n-th request gets the n-th draw, so a single-threaded client meets the same faults every time."""

    def __init__(self, rates: FaultRates, *, seed: int) -> None:
        self.rates = rates  # may be replaced while requests run: calm after a storm
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def __call__(self, _method: str, _path: str) -> Fault:
        with self._lock:
            drawn, choice = self._random.random(), self._random.random()
        for kind, rate in dataclasses.asdict(self.rates).items():
            if drawn < rate:
                options = {"error": _ERRORS, "lose": _LOST}.get(kind, (kind,))
                return options[int(choice * len(options))]
            drawn -= rate
        return "pass"


class FaultProxy:
    """Forwards HTTP to `target`, except where `decide` says otherwise.

    Args:
        target: `http://host:port` of the server behind it.
        decide: what to do with each request.
        slow_seconds: how late a slow answer comes.
        delay_seconds: how long a delayed request waits at most for another one to overtake it.
    """

    def __init__(self, target: str, decide: Decide, *, slow_seconds: float = 0.2, delay_seconds: float = 0.2) -> None:
        self.target = target.rstrip("/")
        self.url = ""
        self.requests: list[tuple[str, str, Fault]] = []
        """Method, path with the query, and what was done, in order of arrival."""
        self._decide = decide
        self._slow_seconds = slow_seconds
        self._delay_seconds = delay_seconds
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def counts(self) -> collections.Counter[Fault]:
        """How many requests met each fate; a kind that never came counts 0."""
        counted = collections.Counter(dict.fromkeys(get_args(Fault), 0))
        counted.update(fault for _, _, fault in list(self.requests))
        return counted

    @property
    def num_faults(self) -> int:
        """Requests that did not simply pass."""
        return len(self.requests) - self.counts["pass"]

    def stop(self) -> None:
        """Break what is open and end; fine to call twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    # --- how ---

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # the starter raises it
            self._failure = error
            self._ready.set()
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        self._arrival = asyncio.Condition()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as self._session:
            runner = web.ServerRunner(
                web.Server(self._handle, max_line_size=65536, max_field_size=65536), shutdown_timeout=0.1
            )
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self._ready.set()
            await self._stopping.wait()
            await runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        # the loop's thread alone appends; a request is counted when it is decided, before it has an effect
        fault = self._decide(request.method, request.raw_path)
        self.requests.append((request.method, request.raw_path, fault))
        async with self._arrival:
            self._arrival.notify_all()
        request._client_max_size = _MAX_BODY_BYTES
        body = await request.read()
        if fault.isdigit():
            return web.Response(status=int(fault), text=f'{{"error": {{"code": {fault}, "message": "injected"}}}}')
        if fault == "reset":
            return self._broken(request)
        if fault == "delay":
            await self._overtaken()
        answer = await self._forward(request, body)
        if fault == "duplicate":
            answer = await self._forward(request, body)
        if fault == "slow":
            await asyncio.sleep(self._slow_seconds)
        if fault == "lose" or (fault == "cut" and not answer.body):
            return self._broken(request)
        if fault == "lose_503":
            return web.Response(status=503, text="the answer was lost")
        return await self._cut(request, answer) if fault == "cut" else answer

    async def _overtaken(self) -> None:
        async def another_arrives() -> None:
            async with self._arrival:
                await self._arrival.wait()

        try:
            await asyncio.wait_for(another_arrives(), self._delay_seconds)
            await asyncio.sleep(0.01)  # and gets ahead
        except TimeoutError:
            pass

    async def _forward(self, request: web.BaseRequest, body: bytes) -> web.Response:
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP]
        headers.append(("Content-Length", str(len(body))))
        url = URL(self.target + request.raw_path, encoded=True)
        try:
            async with self._session.request(
                request.method,
                url,
                data=io.BytesIO(body) if body else None,  # aiohttp warns of large bytes
                headers=headers,
                allow_redirects=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            ) as answer:
                content = await answer.read()
                response = web.Response(status=answer.status, body=content)
                response.headers.clear()
                for name, value in answer.headers.items():
                    if name.lower() == "location":  # of a resumable upload: its parts come through here too
                        value = value.replace(self.target, self.url)
                    if name.lower() not in _HOP_BY_HOP:
                        response.headers.add(name, value)
        except aiohttp.ClientError as error:
            return web.Response(status=502, text=f"no answer behind the proxy: {error}")
        if request.method == "HEAD":  # its length is that of a body that does not come
            response.headers["Content-Length"] = answer.headers.get("Content-Length", "0")
        return response

    async def _cut(self, request: web.BaseRequest, answer: web.Response) -> web.StreamResponse:
        content = answer.body
        assert isinstance(content, bytes)
        partial = web.StreamResponse(status=answer.status, headers=answer.headers)
        partial.content_length = len(content)
        await partial.prepare(request)
        await partial.write(content[: len(content) // 2])
        return self._broken(request, linger=True, response=partial)

    @staticmethod
    def _broken(
        request: web.BaseRequest, *, linger: bool = False, response: web.StreamResponse | None = None
    ) -> web.StreamResponse:
        """Close the connection: at once and with a reset, or after what was written."""
        transport = request.transport
        if transport is not None and not transport.is_closing():
            if linger:
                transport.close()
            else:
                peer: socket.socket = transport.get_extra_info("socket")
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                transport.abort()
        return response or web.Response(status=500)

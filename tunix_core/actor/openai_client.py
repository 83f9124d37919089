"""One server: requests to it, what can go wrong with them, and how many it is given at a time."""

from __future__ import annotations

import asyncio
import collections
import json
import random
import time
from typing import Any

import aiohttp

from tunix_core.actor.openai_dialects import Call, MalformedAnswer
from tunix_core.engine_config import EngineConfig


class Trouble(Exception):
    """A request that brought nothing; `kind` is what it is counted under."""

    def __init__(self, kind: str, detail: str, *, retry: bool = True, retry_after_seconds: float = 0.0) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.retry = retry
        """Whether the same request may go well later."""
        self.retry_after_seconds = retry_after_seconds


class Unreachable(Trouble):
    """No connection, or one that broke: the server may be gone, or another one than before."""


class Overloaded(Trouble):
    """The server has too much to do."""


class Refused(Trouble):
    """The server will not answer this request."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"engine_http_{status}", detail, retry=False)
        self.status = status


class Client:
    """Requests to one base URL over a shared pool of connections."""

    def __init__(self, session: aiohttp.ClientSession, url: str, config: EngineConfig, key: str) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._connect_seconds = config.connect_timeout_seconds
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def request(self, call: Call, timeout_seconds: float) -> Any:
        """The JSON that it answers; None of an empty body.

        Raises:
            Trouble: of the kind that tells what to do about it.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=self._connect_seconds)
        try:
            async with self._session.request(
                call.method, self.url + call.path, json=call.body, headers=self._headers, timeout=timeout
            ) as response:
                body = await response.read()
                status, retry_after = response.status, response.headers.get("Retry-After", "")
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise Unreachable("engine_connection", f"{self.url}: {error!r}") from error
        except TimeoutError as error:
            raise Trouble("engine_timeout", f"{self.url}{call.path}: over {timeout_seconds} s") from error
        except aiohttp.ClientError as error:
            raise Trouble("engine_http", f"{self.url}{call.path}: {error!r}") from error
        if status >= 400:
            raise _refusal(status, f"{self.url}{call.path}: {_text(body)}", retry_after)
        if not body.strip():
            return None
        try:
            return json.loads(body)
        except ValueError as error:
            raise MalformedAnswer(f"{self.url}{call.path}: no JSON") from error


def _refusal(status: int, detail: str, retry_after: str) -> Trouble:
    # 503 is what a server says that starts, or that is full; 429 what a limiter in front of it says.
    if status in (429, 503):
        return Overloaded(f"engine_http_{status}", detail, retry_after_seconds=_seconds(retry_after))
    if status >= 500 or status == 408:
        return Trouble(f"engine_http_{status}", detail)
    return Refused(status, detail)


def _seconds(retry_after: str) -> float:
    """Of a `Retry-After`; a date is not waited for."""
    try:
        return min(max(float(retry_after), 0.0), 3600.0)
    except ValueError:
        return 0.0


def _text(body: bytes) -> str:
    return " ".join(body[:400].decode("utf-8", errors="replace").split())


def pause_seconds(config: EngineConfig, num_failures: int) -> float:
    """Exponential, at random between half and all of it, so that those that failed together do not return together."""
    whole = min(config.first_retry_seconds * 2.0 ** min(num_failures - 1, 32), config.last_retry_seconds)
    return whole * random.uniform(0.5, 1.0)


class Gate:
    """Admission to one server: closed while its weights change, and narrow while it is overloaded.

    Additive increase, multiplicative decrease: a round of served requests lets one more in, an overload half as many.
    """

    HOLD_SECONDS = 1.0
    """Overload answers within so long are one overload: their requests were under way together."""

    def __init__(self, max_requests: int) -> None:
        self._max = float(max_requests)
        self.limit = float(max_requests)
        self.active = 0
        self.is_open = False
        self._waiters: collections.deque[asyncio.Future[None]] = collections.deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._held_until = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    async def enter(self) -> None:
        """Wait for a place, in order of arrival.

        Raises:
            Unreachable: the server went away meanwhile.
        """
        if not self._waiters and self._has_room():
            self._taken()
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.leave()  # its place was given in the very moment that it gave up
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def leave(self) -> None:
        self.active -= 1
        if self.active == 0:
            self._idle.set()
        self._admit()

    async def drained(self) -> None:
        """Nothing is under way."""
        await self._idle.wait()

    def open(self) -> None:
        self.is_open = True
        self._admit()

    def close(self) -> None:
        self.is_open = False

    def turn_away(self, error: Unreachable) -> None:
        """Close, and send those that wait elsewhere."""
        self.close()
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(Unreachable(error.kind, str(error)))

    def served(self) -> None:
        if time.monotonic() >= self._held_until:
            self.limit = min(self._max, self.limit + 1.0 / self.limit)
            self._admit()

    def overloaded(self, retry_after_seconds: float = 0.0) -> None:
        now = time.monotonic()
        if now >= self._held_until:
            self.limit = max(1.0, self.limit / 2.0)
        self._held_until = max(self._held_until, now + max(self.HOLD_SECONDS, retry_after_seconds))

    def _has_room(self) -> bool:
        return self.is_open and self.active < int(self.limit)

    def _taken(self) -> None:
        self.active += 1
        self._idle.clear()

    def _admit(self) -> None:
        while self._waiters and self._has_room():
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._taken()
                waiter.set_result(None)

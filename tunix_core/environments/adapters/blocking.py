"""Environments whose calls block, under an event loop that must not.

A session's calls run one after another on a thread of its own, which lives from the first call to
`close`. Python cannot stop a thread, so cancelling an awaited call means this: the await ends at once,
the call runs on unheard, and the session is over; every further call raises `EnvironmentFailure`, and
`close` does not wait for it. The thread ends when the call does. It is a daemon, so a call that never
returns keeps a thread until the process ends, and keeps neither the other sessions nor the process.
Rejected: the loop's default executor, whose few threads are used up by as many hung calls, and which
the interpreter joins when it ends.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import importlib
import logging
import queue
import random
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from tunix_core.environment_config import EnvironmentConfig
from tunix_core.environments.base import Observation, StepResult, ToolWeather
from tunix_core.errors import EnvironmentFailure
from tunix_core.threads import ABANDONED
from tunix_core.validation import require_package

CLOSE_SECONDS = 5.0
"""How long `close` waits for what an environment does when it is released."""

T = TypeVar("T")
_log = logging.getLogger(__name__)
_GLOBAL_GENERATORS = threading.Lock()


def load_package(module: str, extra: str) -> ModuleType:
    """Import an optional dependency where it is used.

    Raises:
        ConfigError: it is not installed; names the extra.
    """
    require_package(module.partition(".")[0], extra)
    return importlib.import_module(module)


def log_closing(name: str, error: BaseException) -> None:
    """An environment that cannot be released properly costs nothing but this line."""
    _log.warning("%s: closing raised %r", name, error)


class SessionThread:
    """Runs blocking calls in order; see the module."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._abandoned = False
        self._closed = False

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Await `function(*arguments)`.

        Raises:
            EnvironmentFailure: the session is closed, a call before was cancelled, or this one raised what no event
                loop can pass on.
        """
        if self._closed:
            raise EnvironmentFailure(f"{self._name}: closed")
        if self._abandoned:
            raise EnvironmentFailure(f"{self._name}: a call was abandoned before this one and may still run")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            try:
                outcome: Any = function(*arguments)
                failure: Exception | None = None
            except StopIteration as error:  # a future refuses to carry it
                outcome, failure = None, EnvironmentFailure(f"{self._name}: {error!r}")
            except Exception as error:
                outcome, failure = None, error
            except BaseException as error:  # a `sys.exit` in a game must not end the actor
                outcome, failure = None, EnvironmentFailure(f"{self._name}: {error!r}")
            with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever waited
                loop.call_soon_threadsafe(_settle, future, outcome, failure)

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)
        try:
            return await future
        except asyncio.CancelledError:
            self._abandoned = True
            if (abandoned := ABANDONED.get()) is not None:
                abandoned.add()
                self._jobs.put(abandoned.remove)
            raise

    async def close(self, release: Callable[[], None]) -> None:
        """Run `release` last, then end the thread. Nothing is raised: what breaks here is logged."""
        if self._thread is None or self._closed:
            self._closed = True
            return

        def logged() -> None:
            try:
                release()
            except Exception as error:
                log_closing(self._name, error)

        try:
            if self._abandoned:
                self._jobs.put(logged)  # after the hung call, if that ever returns
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_SECONDS):
                        await self.call(logged)
        finally:
            self._closed = True
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _settle(future: asyncio.Future[Any], outcome: Any, failure: Exception | None) -> None:
    if future.done():  # cancelled meanwhile
        return
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(outcome)


class GlobalRandomness:
    """What `random` and `numpy.random` hold for one session, for packages that draw from them.

    Within `installed` the process-wide generators are the session's; one session at a time, so such
    environments take turns, and each plays as if it were alone. Outside, they are as they were.
    """

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % 2**32).get_state()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with _GLOBAL_GENERATORS:
            outside = random.getstate(), np.random.get_state()  # noqa: NPY002
            random.setstate(self._python)
            np.random.set_state(self._numpy)  # noqa: NPY002
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
                random.setstate(outside[0])
                np.random.set_state(outside[1])  # noqa: NPY002


class BlockingEnvironment(abc.ABC):
    """An `Environment` whose `_reset`, `_step` and `_release` may block: they run on the session's thread.

    Latency and faults that a run injects strike before each step.
    """

    name: str

    def __init__(self, config: EnvironmentConfig, *, latency: bool, weather_seed: int) -> None:
        self._weather = ToolWeather(config, weather_seed, latency=latency)
        self._thread = SessionThread(f"{self.name} session")
        self._started = False

    async def reset(self, seed: int) -> Observation:
        self._started = False
        first = await self._thread.call(self._reset, seed)
        self._started = True
        return first

    async def step(self, message: str) -> StepResult:
        if not self._started:
            raise EnvironmentFailure(f"{self.name}: step before reset, or after the end")
        await self._weather.call()
        result = await self._thread.call(self._step, message)
        self._started = not result.done
        return result

    async def close(self) -> None:
        await self._thread.close(self._release)

    @abc.abstractmethod
    def _reset(self, seed: int) -> Observation:
        """See `Environment.reset`."""

    @abc.abstractmethod
    def _step(self, message: str) -> StepResult:
        """See `Environment.step`."""

    def _release(self) -> None:  # noqa: B027  most hold nothing
        """Give back what the session holds, if anything; also after a `_reset` that failed."""

"""Environments whose calls block, under an event loop that must not.

Calls run on the loop's threads (`threads.on_thread`), which an actor bounds and counts. Python cannot stop a
thread, so cancelling an awaited call means this: the await ends at once and the session is over; the call runs
on unheard, every further one raises `EnvironmentFailure`, and `close` does not wait for it. What the session
holds is then released on the call's own thread, when the call returns.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import importlib
import random
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from tunix_core.environment_config import EnvironmentConfig
from tunix_core.environments.base import Observation, StepResult, ToolWeather
from tunix_core.errors import EnvironmentFailure
from tunix_core.threads import on_thread
from tunix_core.validation import require_package

T = TypeVar("T")
_GLOBAL_GENERATORS = threading.Lock()


def load_package(module: str, extra: str) -> ModuleType:
    """Import an optional dependency where it is used.

    Raises:
        ConfigError: it is not installed; names the extra.
    """
    require_package(module.partition(".")[0], extra)
    return importlib.import_module(module)


class GlobalRandomness:
    """What `random` and `numpy.random` hold for one session, for packages that draw from them.

    Within `installed` the process-wide generators are the session's; one session at a time, so such
    environments take turns, and each plays as if it were alone. Outside, they are as they were. Another thread that
    draws from them without this, amid a call, takes from the session's draws: that call's episode would not repeat.
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
    """An `Environment` whose `_reset`, `_step` and `_release` may block.

    Latency and faults that a run injects strike before each step.
    """

    name: str

    def __init__(self, config: EnvironmentConfig, *, latency: bool, weather_seed: int) -> None:
        self._weather = ToolWeather(config, weather_seed, latency=latency)
        self._in_play = False
        self._guard = threading.Lock()
        self._running = False
        self._opened = False
        """Whether a `_reset` began, so that there may be something to release."""
        self._abandoned = False
        self._closed = False

    async def reset(self, seed: int) -> Observation:
        self._in_play = False
        first = await self._call(self._reset, seed)
        self._in_play = True
        return first

    async def step(self, message: str) -> StepResult:
        if not self._in_play:
            raise EnvironmentFailure(f"{self.name}: step before reset, or after the end")
        await self._weather.call()
        result = await self._call(self._step, message)
        self._in_play = not result.done
        return result

    async def close(self) -> None:
        with self._guard:
            done, self._closed = self._closed, True
            if done or self._running or not self._opened:
                return  # a call that still runs releases when it ends
        await on_thread(self._release)

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        if self._abandoned or self._closed:
            raise EnvironmentFailure(f"{self.name}: the session is over: a call of it was abandoned, or it is closed")
        try:
            return await on_thread(self._guarded, function, *arguments)
        except asyncio.CancelledError:
            with self._guard:
                self._abandoned = True
            raise

    def _guarded(self, function: Callable[..., T], *arguments: Any) -> T:
        """One call, on its thread."""
        with self._guard:
            if self._abandoned or self._closed:  # while it waited for a thread
                raise EnvironmentFailure(f"{self.name}: abandoned before it began")
            self._running = self._opened = True
        try:
            return function(*arguments)
        finally:
            with self._guard:
                self._running = False
                release = self._closed
            if release:
                self._release()

    @abc.abstractmethod
    def _reset(self, seed: int) -> Observation:
        """See `Environment.reset`."""

    @abc.abstractmethod
    def _step(self, message: str) -> StepResult:
        """See `Environment.step`."""

    def _release(self) -> None:  # noqa: B027  most hold nothing
        """Give back what the session holds, if anything; also after a `_reset` that failed."""

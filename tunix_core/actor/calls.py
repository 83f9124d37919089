"""Calls of user code that may block, hang, raise anything and ignore its cancellation, kept at arm's length.

A call runs as a task of its own: whatever it does, the session that waits for it goes on at its
deadline. A call that goes on all the same, by swallowing the cancellation or in a thread, is
abandoned: nobody waits for it any more, and it counts as such until it ends. Code that blocks belongs
on a thread (`threads.on_thread`), whose number is bounded here; on the event loop it would hold up
every session.

Every exception is the episode's failure and no more: `SystemExit` and `KeyboardInterrupt` from a tool
too, since signals reach this process by their handlers and never as an exception.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from tunix_core.actor.episodes import EpisodeFailed
from tunix_core.config import RunConfig
from tunix_core.environments import Environment
from tunix_core.errors import EnvironmentFailure
from tunix_core.threads import AbandonableThreads, AbandonedCalls

CANCEL_GRACE_SECONDS = 0.2
"""How long a cancelled call may tidy up before it counts as abandoned."""

MAX_DETAIL_CHARACTERS = 300

T = TypeVar("T")


class _Raised(NamedTuple):
    error: BaseException


class Calls:
    """All calls of one event loop.

    Args:
        max_threads: at once, the abandoned ones included.
    """

    def __init__(self, max_threads: int) -> None:
        self.abandoned = AbandonedCalls()
        self.threads = AbandonableThreads(max_threads, self.abandoned)
        self._closing: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[Any]] = set()
        """Cancelled, and within their grace."""
        self._deaf: set[asyncio.Task[Any]] = set()
        """Past it: kept, for a task that nobody holds would be destroyed."""
        self.num_failed_closes = 0
        """Environments that could not be closed in time or without an error."""

    async def run(self, call: Callable[[], Awaitable[T]], seconds: float) -> T:
        """The result of `call`.

        Raises:
            EpisodeFailed: it raised, or was not done after `seconds`.
        """
        task = asyncio.get_running_loop().create_task(_contained(call))
        try:
            await asyncio.wait({task}, timeout=seconds)
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=CANCEL_GRACE_SECONDS)
                raise EpisodeFailed("environment_timeout", f"over {seconds:g} s")
        finally:
            if not task.done():
                self._let_go(task)
        if task.cancelled():
            raise EpisodeFailed("environment_CancelledError", "it cancelled itself")
        result = task.result()
        if isinstance(result, _Raised):
            raise _failure(result.error) from result.error
        return result

    def close(self, environment: Environment, seconds: float) -> None:
        """Close it in the background, within `seconds`."""
        task = asyncio.get_running_loop().create_task(self._close(environment, seconds))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def finish_closing(self, seconds: float) -> None:
        """Wait for what is being closed, at most so long."""
        if self._closing:
            await asyncio.wait(set(self._closing), timeout=seconds)

    async def _close(self, environment: Environment, seconds: float) -> None:
        if self._leaving:  # perhaps a step of this very environment, which may tidy up first
            await asyncio.wait(set(self._leaving), timeout=CANCEL_GRACE_SECONDS)
        try:
            await self.run(environment.close, seconds)
        except EpisodeFailed:
            self.num_failed_closes += 1

    def _let_go(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        asyncio.get_running_loop().call_later(CANCEL_GRACE_SECONDS, self._abandon, task)

    def _abandon(self, task: asyncio.Task[Any]) -> None:
        if not task.done():
            self._leaving.discard(task)
            self._deaf.add(task)
            self.abandoned.add()
            task.add_done_callback(self._has_ended)

    def _has_ended(self, task: asyncio.Task[Any]) -> None:
        self._deaf.discard(task)
        self.abandoned.remove()


async def _contained(call: Callable[[], Awaitable[T]]) -> T | _Raised:
    try:
        return await call()
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # see the module's docstring
        return _Raised(error)


def _failure(error: BaseException) -> EpisodeFailed:
    try:
        detail = str(error)[:MAX_DETAIL_CHARACTERS]
    except Exception:  # an exception of user code may fail even at that
        detail = "its text cannot be had"
    if isinstance(error, EpisodeFailed):
        return error
    kind = "failure" if isinstance(error, EnvironmentFailure) else type(error).__name__
    return EpisodeFailed(f"environment_{kind}", detail)


def abandonable_calls(config: RunConfig) -> Calls:
    """For as many sessions as the actor has slots, each with its step and that step's tools on threads, and for what
    is abandoned. A thread is made when it is needed."""
    per_session = 1 + config.environment.max_calls_per_turn
    return Calls(per_session * config.actor.num_slots + config.actor.max_abandoned_calls)


def run_loop(main: Coroutine[Any, Any, None], calls: Calls) -> None:
    """`asyncio.run`, whose end does not wait for calls that were abandoned."""
    loop = asyncio.new_event_loop()
    loop.set_default_executor(calls.threads)
    # Of a task that goes on for ever: when the loop is gone it is destroyed, which asyncio would report.
    loop.set_exception_handler(_report)
    try:
        loop.run_until_complete(main)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=CANCEL_GRACE_SECONDS))
        with contextlib.suppress(TimeoutError):
            loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), CANCEL_GRACE_SECONDS))
        calls.threads.shutdown()
        loop.close()


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if "destroyed" not in str(context.get("message")):
        loop.default_exception_handler(context)

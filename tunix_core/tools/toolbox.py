"""Runs the calls of one message: at once or in turn, each within its limits, results in the message's order."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from tunix_core.errors import EnvironmentFailure
from tunix_core.threads import on_thread
from tunix_core.tools.formats import Call, Malformed, Result
from tunix_core.tools.functions import Tool, ToolError
from tunix_core.tools.schema import ArgumentError
from tunix_core.tools.text import cut


class ToolLimits(NamedTuple):
    """Of one message's calls."""

    max_calls: int = 8
    max_output_bytes: int = 16_384
    call_timeout_seconds: float = 5.0


class CallRecord(NamedTuple):
    """One call as a rubric sees it."""

    name: str
    arguments: Mapping[str, Any]
    text: str
    """What the policy was told."""
    ok: bool


@dataclasses.dataclass
class Outcomes:
    """Of one message."""

    results: list[Result]
    """For the observation, the refusals of malformed calls among them."""
    records: list[CallRecord]
    """Of the calls that were made."""
    num_malformed: int
    """Unreadable, of unknown tools, with arguments that do not fit, or too many."""
    num_failed: int
    """Calls whose tool raised or took too long."""


async def run_calls(
    tools: Mapping[str, Tool],
    calls: Sequence[Call | Malformed],
    limits: ToolLimits,
    *,
    before: Callable[[], Awaitable[None]] | None = None,
    refusal: str = "",
    at_once: bool = True,
) -> Outcomes:
    """Run what a message calls.

    A tool that raises, or takes too long, has failed: the policy is told, and nothing is raised here. Sync ones run
    on the loop's threads; one that hangs is abandoned there, which an actor counts (`actor.max_abandoned_calls`).

    Args:
        before: awaited ahead of each call, outside its deadline.
        refusal: told in place of the reason why a call is malformed.
        at_once: false runs each call after the one before it.

    Raises:
        EnvironmentFailure: `before` or a tool raised one: that broke the environment itself.
    """
    plans = [_plan(tools, call) for call in calls[: limits.max_calls]]
    runs = {place: plan for place, plan in enumerate(plans) if isinstance(plan, _Planned)}
    if at_once:
        made = await _together([_run(plan, limits, before) for plan in runs.values()])
    else:
        made = [await _run(plan, limits, before) for plan in runs.values()]
    done = dict(zip(runs, made, strict=True))
    num_surplus = max(0, len(calls) - limits.max_calls)
    results = []
    for place, plan in enumerate(plans):
        if place in done:
            results.append(Result(done[place].name, done[place].text, done[place].ok))
        else:
            assert isinstance(plan, Result)
            results.append(plan._replace(text=refusal) if refusal else plan)
    if num_surplus:
        text = f"error: {num_surplus} more calls were not made: at most {limits.max_calls} in a message"
        results.append(Result("", refusal or text, False))
    return Outcomes(results, made, len(calls) - len(made), sum(not record.ok for record in made))


async def _together(runs: Sequence[Coroutine[Any, Any, CallRecord]]) -> list[CallRecord]:
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:  # of what the others do nobody would hear
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class _Planned(NamedTuple):
    tool: Tool
    given: Mapping[str, Any]
    arguments: dict[str, Any]


def _plan(tools: Mapping[str, Tool], call: Call | Malformed) -> _Planned | Result:
    """What is to be run, or the refusal."""
    if isinstance(call, Malformed):
        return Result("", f"error: {call.reason}", False)
    if call.name not in tools:
        return Result("", f"error: no tool {call.name[:60]!r}, accepted {', '.join(tools)}", False)
    try:
        return _Planned(tools[call.name], call.arguments, tools[call.name].arguments(call.arguments))
    except ArgumentError as error:
        return Result(call.name, f"error: {error}", False)


async def _run(plan: _Planned, limits: ToolLimits, before: Callable[[], Awaitable[None]] | None) -> CallRecord:
    if before is not None:
        await before()
    text, ok = await _outcome(plan, limits.call_timeout_seconds)
    return CallRecord(plan.tool.name, plan.given, cut(text, limits.max_output_bytes)[0], ok)


async def _outcome(plan: _Planned, timeout_seconds: float) -> tuple[str, bool]:
    task = asyncio.current_task()
    try:
        async with asyncio.timeout(timeout_seconds) as deadline:
            if plan.tool.is_async:
                value = await plan.tool.function(**plan.arguments)
            else:
                value = await on_thread(plan.tool.function, **plan.arguments)
        return as_text(value), True
    except ToolError as error:
        return str(error), False
    except EnvironmentFailure:
        raise
    except asyncio.CancelledError:
        if task is None or task.cancelling():  # the episode is called off
            raise
        return "error: the tool was cancelled", False
    except TimeoutError as error:
        if deadline.expired():
            return f"error: took more than {timeout_seconds:g} s", False
        return f"error: TimeoutError: {error}", False
    except (Exception, SystemExit) as error:
        return f"error: {type(error).__name__}: {error}", False


def as_text(value: Any) -> str:
    """Text as it is, nothing for None, JSON for all else.

    Raises:
        TypeError, ValueError: JSON cannot say it.
    """
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    return json.dumps(value, ensure_ascii=False)

"""Running calls: at once, in order, within limits, and whatever a tool does."""

import asyncio
import dataclasses
import threading
from typing import Any

import pytest

from tunix_core.errors import EnvironmentFailure
from tunix_core.threads import AbandonableThreads, AbandonedCalls
from tunix_core.tools.formats import Call, Malformed
from tunix_core.tools.functions import ToolError, make_tools
from tunix_core.tools.toolbox import Outcomes, ToolLimits, as_text, run_calls

LIMITS = ToolLimits(max_calls=4, max_output_bytes=64, call_timeout_seconds=0.2)


class Tools:
    """Of one test."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.both = asyncio.Barrier(2)

    async def meet(self, name: str) -> str:
        await self.both.wait()
        return name

    def thread(self) -> str:
        return threading.current_thread().name

    def fails(self, how: str) -> None:
        raise {
            "value": ValueError("no"),
            "tool": ToolError("try again"),
            "exit": SystemExit(3),
            "stop": StopIteration(),
            "environment": EnvironmentFailure("broken"),
        }[how]

    async def fails_later(self, how: str) -> None:
        await asyncio.sleep(0)
        raise (
            asyncio.CancelledError if how == "cancelled" else {"exit": SystemExit(3), "time": TimeoutError("late")}[how]
        )

    async def hangs(self) -> None:
        await asyncio.Event().wait()

    def hangs_in_thread(self) -> None:
        self.release.wait(30)

    def large(self) -> str:
        return "é" * 100

    def odd(self) -> Any:
        return {1, 2}


def run(
    *calls: Call | Malformed, refusal: str = "", limits: ToolLimits = LIMITS, tools: Tools | None = None
) -> Outcomes:
    async def go() -> Outcomes:
        own = tools or Tools()
        methods = [
            own.meet,
            own.thread,
            own.fails,
            own.fails_later,
            own.hangs,
            own.hangs_in_thread,
            own.large,
            own.odd,
        ]
        try:
            return await run_calls(make_tools(methods), calls, limits, refusal=refusal)
        finally:
            own.release.set()

    return asyncio.run(go())


def texts(outcomes: Outcomes) -> list[str]:
    return [result.text for result in outcomes.results]


def test_calls_run_at_once_and_answer_in_order() -> None:
    # Each of the two waits for the other: one after the other would take for ever.
    outcomes = run(Call("meet", {"name": "b"}), Malformed("broken"), Call("meet", {"name": "a"}))
    assert texts(outcomes) == ["b", "error: broken", "a"]
    assert [(record.name, record.arguments, record.ok) for record in outcomes.records] == [
        ("meet", {"name": "b"}, True),
        ("meet", {"name": "a"}, True),
    ]
    assert (outcomes.num_malformed, outcomes.num_failed) == (1, 0)


def test_sync_tools_run_in_threads() -> None:
    (name,) = texts(run(Call("thread", {})))
    assert name != threading.current_thread().name


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (Call("nothing", {}), "error: no tool 'nothing', accepted meet, thread, "),
        (Call("meet", {}), "error: name: missing"),
        (Call("meet", {"name": 3}), "error: name: received 3, accepted a string"),
        (Malformed("not JSON"), "error: not JSON"),
    ],
)
def test_a_malformed_call_is_told_and_counted(call: Call | Malformed, text: str) -> None:
    outcomes = run(call)
    assert outcomes.results[0].text.startswith(text)
    assert not outcomes.results[0].ok
    assert not outcomes.records
    assert (outcomes.num_malformed, outcomes.num_failed) == (1, 0)
    assert texts(run(call, refusal="?")) == ["?"]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (Call("fails", {"how": "value"}), "error: ValueError: no"),
        (Call("fails", {"how": "tool"}), "try again"),
        (Call("fails", {"how": "exit"}), "error: RuntimeError: SystemExit: 3"),
        (Call("fails", {"how": "stop"}), "error: RuntimeError: StopIteration: "),
        (Call("fails_later", {"how": "exit"}), "error: SystemExit: 3"),
        (Call("fails_later", {"how": "time"}), "error: TimeoutError: late"),
        (Call("fails_later", {"how": "cancelled"}), "error: the tool was cancelled"),
        (Call("hangs", {}), "error: took more than 0.2 s"),
        (Call("hangs_in_thread", {}), "error: took more than 0.2 s"),
        (Call("odd", {}), "error: TypeError: Object of type set is not JSON serializable"),
    ],
)
def test_a_tool_that_fails_is_told_and_counted(call: Call, text: str) -> None:
    outcomes = run(call)
    assert texts(outcomes) == [text]
    assert [record.ok for record in outcomes.records] == [False]
    assert (outcomes.num_malformed, outcomes.num_failed) == (0, 1)


def test_more_calls_than_allowed_are_not_made() -> None:
    outcomes = run(*[Call("thread", {})] * 6)
    assert len(outcomes.records) == 4
    assert outcomes.num_malformed == 2
    assert texts(outcomes)[4:] == ["error: 2 more calls were not made: at most 4 in a message"]


def test_output_is_cut_between_characters_with_a_mark() -> None:
    assert texts(run(Call("large", {}))) == ["é" * 29 + " [cut]"]


def test_an_environment_that_breaks_is_no_failed_call() -> None:
    with pytest.raises(EnvironmentFailure, match="broken"):
        run(Call("fails", {"how": "environment"}), Call("hangs", {}), limits=LIMITS._replace(call_timeout_seconds=30))


def test_a_cancelled_step_cancels_its_calls() -> None:
    async def go() -> bool:
        tools, seen = Tools(), asyncio.Event()

        async def watched() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                seen.set()

        step = asyncio.ensure_future(run_calls(make_tools([watched, tools.hangs]), [Call("watched", {})], LIMITS))
        await asyncio.sleep(0.01)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        return seen.is_set()

    assert asyncio.run(go())


def test_a_call_that_hangs_is_abandoned_and_counted_until_it_ends() -> None:
    """By the threads of the loop, which an actor bounds; other calls go on."""
    tools, abandoned = Tools(), AbandonedCalls()

    async def go() -> None:
        asyncio.get_running_loop().set_default_executor(AbandonableThreads(2, abandoned))
        box = make_tools([tools.hangs_in_thread, tools.thread])
        limits = LIMITS._replace(call_timeout_seconds=0.05)
        assert (await run_calls(box, [Call("hangs_in_thread", {})], limits)).num_failed == 1
        assert abandoned.num_now == 1
        assert (await run_calls(box, [Call("thread", {})], LIMITS)).num_failed == 0
        tools.release.set()
        while abandoned.num_now:
            await asyncio.sleep(0.001)

    asyncio.run(go())
    assert abandoned.num_ever == 1


@dataclasses.dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    ("value", "text"),
    [("é", "é"), (None, ""), (3, "3"), ([1, "é"], '[1, "é"]'), (Point(1), '{"x": 1}'), (True, "true")],
)
def test_results_as_text(value: Any, text: str) -> None:
    assert as_text(value) == text

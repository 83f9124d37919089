"""One session against environments that do everything wrong, on a scripted engine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.actor.scripted_engine import ScriptedEngine
from tests.actor.sessions import LIMITS, play, says
from tests.pretrained.bpe import QWEN3, bpe
from tunix_core.actor.calls import CANCEL_GRACE_SECONDS, Calls
from tunix_core.actor.episodes import EpisodeFailed
from tunix_core.environments import Observation, StepResult, ToolCall
from tunix_core.errors import EnvironmentFailure
from tunix_core.storage.shards import decode, encode
from tunix_core.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
GO_ON = StepResult("more", 0.25, False, (ToolCall("get", True), ToolCall("put", False)), {"part": 1.0})
SLOW = GO_ON._replace(text="later")
DONE = StepResult("", 1.0, True, components={"answer": 1.0})


class Scripted:
    """Steps as told; counts its closes."""

    name = "scripted"

    def __init__(self, step: Callable[[str], Awaitable[Any]], first: Any = Observation("go")) -> None:  # noqa: B008
        self._step = step
        self._first = first
        self.num_closes = 0

    async def reset(self, _seed: int) -> Observation:
        return self._first

    async def step(self, message: str) -> StepResult:
        return await self._step(message)

    async def close(self) -> None:
        self.num_closes += 1


def returning(*results: Any) -> Callable[[str], Awaitable[Any]]:
    left = list(results)

    async def step(_message: str) -> Any:
        result = left.pop(0) if len(left) > 1 else left[0]
        if result is SLOW:
            await asyncio.sleep(0.7)
        return result

    return step


def test_turns_tile_the_tokens_and_rewards_add_up() -> None:
    environment = Scripted(returning(GO_ON, GO_ON, DONE))
    ((row,),), _ = play(lambda _: environment, script=says("hi"))
    assert [turn.role for turn in row.turns] == ["prompt", "policy", "tool", "policy", "tool", "policy"]
    assert [turn.start for turn in row.turns] == [0, *[turn.end for turn in row.turns[:-1]]]
    assert row.turns[-1].end == row.num_tokens
    assert (row.reward, row.reward_components, row.finish_reason) == (1.5, {"answer": 1.0}, "completed")
    assert [turn.reward for turn in row.turns] == [0, 0.25, 0, 0.25, 0, 1.0]
    assert (row.turns[2].tool_name, row.turns[2].tool_ok) == ("get,put", False)
    said = [(message["role"], message["content"]) for message in json.loads(row.messages)]
    assert said == [
        ("prompt", "go"),
        ("policy", "hi"),
        ("tool", "more"),
        ("policy", "hi"),
        ("tool", "more"),
        ("policy", "hi"),
    ]
    assert environment.num_closes == 1


@pytest.mark.parametrize(
    ("limits", "script", "steps", "reason"),
    [
        ({"max_turns": 2}, says("hi"), (GO_ON,), "max_turns"),
        ({}, says("hi", ends=False), (GO_ON,), "max_turn_tokens"),
        ({}, says("x" * 100, ends=False), (GO_ON,), "max_tokens"),
        ({}, says("hi"), (GO_ON._replace(text="y" * 200),), "max_tokens"),
        ({"episode_seconds": 0.5, "step_seconds": 20.0}, says("hi"), (SLOW,), "max_seconds"),
        ({}, says("hi"), (GO_ON._replace(done=True, truncated=True),), "truncated"),
    ],
)
def test_each_limit_has_its_own_finish_reason(limits: dict[str, Any], script: Any, steps: Any, reason: str) -> None:
    engine = ScriptedEngine(script, num_slots=1, end_of_turn=BYTES.end_of_turn, context_tokens=64)

    ((row,),), _ = play(
        lambda _: Scripted(returning(*steps)),
        script=script,
        engine=engine,
        limits=dataclasses.replace(LIMITS, **limits),
    )
    assert row.finish_reason == reason
    assert row.num_tokens <= 64


@pytest.mark.parametrize("make_tokenizer", [ByteTokenizer, bpe, lambda: bpe(QWEN3)])
def test_a_message_that_a_stop_rule_ended_gets_its_mark_from_the_environment(make_tokenizer: Any) -> None:
    """… where the episode goes on: no token of the policy, part of what the tool answers."""
    tokenizer = make_tokenizer()
    (stop,) = tokenizer.encode("!")[-1:]
    ids = [*tokenizer.encode("get a"), stop]
    engine = ScriptedEngine(
        lambda _: list(ids), num_slots=1, end_of_turn=tokenizer.end_of_turn, tokens_per_advance=3, stop_id=stop
    )
    limits = dataclasses.replace(LIMITS, max_observation_bytes=4096)
    environment = Scripted(returning(GO_ON, DONE))
    ((row,),), _ = play(lambda _: environment, script=lambda _: ids, engine=engine, tokenizer=tokenizer, limits=limits)
    assert row.finish_reason == "completed"
    _, first, tool, last = row.turns
    assert row.tokens[first.start : first.end].tolist() == row.tokens[last.start : last.end].tolist() == ids
    assert row.tokens[tool.start] == tokenizer.end_of_turn
    assert not row.loss_mask[tool.start : tool.end].any()
    assert row.loss_mask[first.start : first.end].all()
    ended = [*row.tokens[: first.end].tolist(), *row.tokens[tool.start : tool.end].tolist()]
    framing = tokenizer.framing()
    expected = [*framing.opening("", "go"), *ids, tokenizer.end_of_turn, *framing.reply(ids, "more").ids]
    assert ended == expected


class Undecided:
    def __bool__(self) -> bool:
        raise RuntimeError("neither")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EnvironmentFailure("x"), "environment_failure"),
        (ZeroDivisionError("x"), "environment_ZeroDivisionError"),
        (TimeoutError("its own"), "environment_TimeoutError"),
        (StopIteration(), "environment_RuntimeError"),  # Python's own rule for coroutines
        (SystemExit(3), "environment_SystemExit"),
        (KeyboardInterrupt(), "environment_KeyboardInterrupt"),
        (GeneratorExit(), "environment_GeneratorExit"),
        (asyncio.CancelledError(), "environment_CancelledError"),
        (MemoryError(), "environment_MemoryError"),
        (Unprintable(), "environment_Unprintable"),
    ],
)
def test_whatever_is_raised_costs_the_episode_only(error: BaseException, kind: str) -> None:
    async def step(_message: str) -> StepResult:
        raise error

    environment = Scripted(step)
    (outcome,), _ = play(lambda _: environment, script=says("hi"))
    assert isinstance(outcome, EpisodeFailed)
    assert outcome.kind == kind
    assert environment.num_closes == 1


@pytest.mark.parametrize(
    "result",
    [
        None,
        "text",
        GO_ON._replace(text=b"bytes"),
        GO_ON._replace(reward=math.nan),
        GO_ON._replace(reward="much"),
        GO_ON._replace(components={"part": math.inf}),
        GO_ON._replace(components={str(i): 1.0 for i in range(100)}),
        GO_ON._replace(components=None),
        GO_ON._replace(tool_calls=("get",)),
        GO_ON._replace(tool_calls=(ToolCall("get", Undecided()),)),
        GO_ON._replace(tool_calls=(ToolCall("get", True),) * 10_000),
        GO_ON._replace(reward=1e39),
    ],
)
def test_what_is_no_result_is_a_failure(result: Any) -> None:
    (outcome,), _ = play(lambda _: Scripted(returning(result)), script=says("hi"))
    assert isinstance(outcome, EpisodeFailed)
    assert outcome.kind == "environment_invalid"


def test_names_that_no_file_can_hold_are_mended() -> None:
    half = StepResult("", 1.0, True, (ToolCall("get\ud800", True),), {"part\ud800": 1.0, "long" * 1000: 2.0})
    (rows,), _ = play(
        lambda _: Scripted(returning(GO_ON._replace(tool_calls=half.tool_calls), half)), script=says("hi")
    )
    assert not isinstance(rows, EpisodeFailed)
    assert decode(encode(rows)).faults == {}
    assert rows[0].turns[2].tool_name == "get?"
    assert max(map(len, rows[0].reward_components)) == 200


@pytest.mark.parametrize(
    ("first", "kind", "retryable"),
    [
        (None, "environment_invalid", True),
        (Observation("go", tools=({"f": object()},)), "environment_invalid", True),
        (Observation("x" * 257), "prompt_too_long", False),
    ],
)
def test_what_is_no_question_is_a_failure(first: Any, kind: str, retryable: bool) -> None:
    (outcome,), _ = play(lambda _: Scripted(returning(DONE), first), script=says("hi"))
    assert isinstance(outcome, EpisodeFailed)
    assert (outcome.kind, outcome.retryable) == (kind, retryable)


def test_an_environment_that_cannot_be_made_is_a_failure() -> None:
    def broken(_seed: int) -> Any:
        raise OSError("no such thing")

    (outcome,), _ = play(broken, script=says("hi"))
    assert isinstance(outcome, EpisodeFailed)
    assert outcome.kind == "environment_OSError"


def test_a_long_answer_is_cut_and_counted() -> None:
    long = GO_ON._replace(text="é" * 1000 + "\ud800")
    ((row,),), scheduler = play(lambda _: Scripted(returning(long, DONE)), script=says("hi"))
    said = json.loads(row.messages)[2]["content"]
    assert said == "é" * 125 + " [cut]"
    assert len(said.encode()) == LIMITS.max_observation_bytes
    assert row.turns[2].end - row.turns[2].start == LIMITS.max_observation_bytes + 1
    assert scheduler.counters.num_cut_observations == 1


async def ignores_everything(_message: str) -> StepResult:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


async def hangs(_message: str) -> StepResult:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


@pytest.mark.parametrize(("step", "num_abandoned"), [(hangs, 0), (ignores_everything, 1)])
def test_a_step_that_hangs_costs_its_episode_and_no_slot(step: Any, num_abandoned: int) -> None:
    """Two slots and six episodes, of which three hang: all others are played, in the slots of those that hung."""
    outcomes, scheduler = play(
        lambda seed: Scripted(step if hung(seed) else returning(DONE)),
        script=says("hi"),
        num_episodes=6,
        num_slots=2,
        limits=dataclasses.replace(LIMITS, step_seconds=0.4),
    )
    kinds = [outcome.kind if isinstance(outcome, EpisodeFailed) else "played" for outcome in outcomes]
    assert sorted(set(kinds)) == ["environment_timeout", "played"]
    assert scheduler.calls.abandoned.num_now <= kinds.count("environment_timeout")
    assert scheduler.calls.abandoned.num_ever == num_abandoned * kinds.count("environment_timeout")


def hung(seed: int) -> bool:
    return seed % 2 == 0


def test_a_thread_that_hangs_is_abandoned_and_counted_until_it_ends() -> None:
    release, calls = threading.Event(), Calls(4)

    async def blocks(_message: str) -> StepResult:
        await asyncio.to_thread(release.wait)
        return DONE

    (outcome,), _ = play(
        lambda _: Scripted(blocks),
        script=says("hi"),
        calls=calls,
        limits=dataclasses.replace(LIMITS, step_seconds=0.05),
    )
    assert isinstance(outcome, EpisodeFailed)
    assert (calls.abandoned.num_now, calls.abandoned.num_ever) == (1, 1)
    release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("call-"):
            thread.join(120)
            assert not thread.is_alive()
    assert (calls.abandoned.num_now, calls.abandoned.num_ever) == (0, 1)


def test_blocking_code_runs_in_many_threads_at_once() -> None:
    """All members of a party of 24 must be in their threads at the same time to get on."""
    party = threading.Barrier(24)

    async def meets(_message: str) -> StepResult:
        await asyncio.to_thread(party.wait, 20)
        return DONE

    outcomes, _ = play(
        lambda _: Scripted(meets),
        script=says("hi"),
        num_episodes=24,
        num_slots=24,
        limits=dataclasses.replace(LIMITS, step_seconds=20.0),
    )
    assert not any(isinstance(outcome, EpisodeFailed) for outcome in outcomes)


class BadlyClosed(Scripted):
    async def close(self) -> None:
        self.num_closes += 1
        if self.num_closes == 1:
            raise RuntimeError("scripted")


def test_a_close_that_fails_or_hangs_is_counted_and_holds_up_nothing() -> None:
    class Hangs(Scripted):
        async def close(self) -> None:
            await asyncio.Event().wait()

    limits = dataclasses.replace(LIMITS, step_seconds=0.05)
    outcomes, scheduler = play(
        lambda seed: (Hangs if hung(seed) else BadlyClosed)(returning(DONE)),
        script=says("hi"),
        num_episodes=4,
        num_slots=1,
        limits=limits,
    )
    assert not any(isinstance(outcome, EpisodeFailed) for outcome in outcomes)
    assert scheduler.calls.num_failed_closes == 4


def test_close_comes_after_the_step_has_tidied_up() -> None:
    told = []

    class Tidy(Scripted):
        async def close(self) -> None:
            told.append("closed")

    async def step(_message: str) -> StepResult:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(CANCEL_GRACE_SECONDS / 4)
            told.append("tidied up")
        raise AssertionError("unreachable")

    abandoned = []

    def meanwhile(scheduler: Any) -> None:
        if scheduler.engine.num_parked and not abandoned:
            abandoned.append(scheduler.abandon("g"))

    (outcome,), _ = play(
        lambda _: Tidy(step),
        script=says("hi"),
        limits=dataclasses.replace(LIMITS, step_seconds=20.0),
        meanwhile=meanwhile,
    )
    assert outcome is None
    assert abandoned == [1]
    assert told == ["tidied up", "closed"]


def test_a_policy_that_never_ends_its_turn_is_cut_off_with_its_episode() -> None:
    class Silent(ScriptedEngine):
        async def advance(self) -> Any:
            await asyncio.sleep(3600)

    engine = Silent(says("hi"), num_slots=1, end_of_turn=BYTES.end_of_turn)
    (outcome,), _ = play(
        lambda _: Scripted(returning(DONE)),
        script=says("hi"),
        engine=engine,
        limits=dataclasses.replace(LIMITS, step_seconds=0.05, episode_seconds=0.1),
    )
    assert isinstance(outcome, EpisodeFailed)
    assert outcome.kind == "episode_timeout"


def test_hundreds_of_sessions_wait_for_their_tools_together() -> None:
    """No step returns before all sessions wait in theirs."""
    waiting, everyone = [], asyncio.Event()

    async def step(_message: str) -> StepResult:
        waiting.append(1)
        if len(waiting) == 300:
            everyone.set()
        await everyone.wait()
        return DONE

    outcomes, _ = play(
        lambda _: Scripted(step),
        script=says("hi"),
        num_episodes=300,
        num_slots=300,
        limits=dataclasses.replace(LIMITS, step_seconds=20.0),
    )
    assert not any(isinstance(outcome, EpisodeFailed) for outcome in outcomes)

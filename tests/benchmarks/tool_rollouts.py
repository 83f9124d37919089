"""Two-turn episodes with a slow tool, through the real scheduler and sessions, against a loop that waits.

A policy message, a tool of half a second, a policy message. Sessions that wait for the tool are parked: off the
batch, their cache kept. So no token is read twice, and nearly every row that is decoded gives a kept token. The
baseline is a loop over the same engine that fills all slots, lets all speak, waits for all tools, and goes on: what a
synchronous rollout does.

The policy is untrained; a constant hidden unit gives its end of turn the same small chance at every token, so
lengths are geometric.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import jax
import numpy as np

from tests.benchmarks.figures import Goal, Sample
from tests.benchmarks.generation_work import CONSTANT_UNIT, MODELS, make_weights
from tunix_core.actor.calls import Calls
from tunix_core.actor.engine import Engine
from tunix_core.actor.episodes import EpisodeFailed, EpisodeSpec, Identity, Limits, Outcome
from tunix_core.actor.policy_engine import EngineCounters, Request
from tunix_core.actor.sampling import request_key
from tunix_core.actor.scheduler import Scheduler
from tunix_core.config import ActorConfig, ModelConfig
from tunix_core.environments import Observation, StepResult, ToolCall
from tunix_core.models import decoder
from tunix_core.tokenizer import ByteTokenizer
from tunix_core.types import Trajectory

TOOL_SECONDS = 0.5
MEAN_TURN = 48
MAX_TURN = 512
"""Rarely reached: one turn in forty thousand."""
ANSWER = "The first, by 40 km."
GOAL_KEPT = 0.9
TOKENIZER = ByteTokenizer()


def question(seed: int) -> str:
    """Every session's own, from the first characters on: nobody can take over another's cache."""
    return f"{seed:06d}: which of the two rivers is the longer one?"


class OneTool:
    """Asks, answers the first message after `TOOL_SECONDS`, and ends with the second."""

    name = "one-tool"

    def __init__(self) -> None:
        self._steps = 0

    async def reset(self, seed: int) -> Observation:
        self._steps = 0
        return Observation(question(seed))

    async def step(self, _message: str) -> StepResult:
        self._steps += 1
        if self._steps == 2:
            return StepResult("", 1.0, True)
        await asyncio.sleep(TOOL_SECONDS)
        return StepResult(ANSWER, 0.0, False, (ToolCall("look-up", True),))

    async def close(self) -> None:
        """Holds nothing."""


def weights_that_stop(model: ModelConfig, mean_turn: float) -> decoder.Params:
    """`make_weights` with an end of turn about every `mean_turn` tokens."""
    params = make_weights(model)
    end = TOKENIZER.end_of_turn
    params["head"][:, end] = 0
    tokens = np.random.default_rng(0).integers(2, model.vocab_size, (4, 64), np.int32)
    positions = np.broadcast_to(np.arange(64, dtype=np.int32), tokens.shape)
    hidden = decoder.hidden_states(params, model, tokens, positions, np.ones_like(tokens))
    log_totals = jax.nn.logsumexp(hidden @ params["head"], axis=-1)
    constant = np.asarray(hidden)[..., CONSTANT_UNIT]
    params["head"][CONSTANT_UNIT, end] = np.mean(np.asarray(log_totals) - np.log(mean_turn)) / constant.mean()
    return params


class _Counts:
    """What an engine did since."""

    def __init__(self, counters: EngineCounters) -> None:
        self._counters = counters
        self._before = self._numbers()
        self._started = time.perf_counter(), time.process_time()

    def _numbers(self) -> dict[str, float]:
        return {name: value for name, value in vars(self._counters).items() if isinstance(value, int | float)}

    def since(self) -> dict[str, float]:
        now = self._numbers()
        counts = {name: now[name] - before for name, before in self._before.items()}
        started, cpu_started = self._started
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        return {**counts, "seconds": seconds, "cpu_seconds": cpu_seconds}


def _spec(number: int) -> EpisodeSpec:
    return EpisodeSpec(group_id=f"g{number}", group_size=1, member=0, task_id="t", task_seed=2 * number)


async def play_scheduled(engine: Engine, num_sessions: int) -> dict[str, Any]:
    """All sessions through the scheduler, as many at a time as there are slots."""
    outcomes: list[Outcome] = []
    identity = Identity(actor_id="actor", incarnation="benchmark", environment=OneTool.name, temperature=1.0)
    limits = Limits(max_turns=2, max_forks=0, step_seconds=60.0, episode_seconds=600.0, max_observation_bytes=1000)
    scheduler = Scheduler(
        engine,
        identity,
        limits,
        lambda _seed: OneTool(),
        TOKENIZER,
        0,
        Calls(2 * num_sessions),
        lambda _spec, outcome: outcomes.append(outcome),
    )
    counts = _Counts(engine.counters)
    started, most_parked = 0, 0
    while len(outcomes) < num_sessions:
        while started < num_sessions and scheduler.num_free:
            scheduler.start(_spec(started))
            started += 1
        await scheduler.step(0.05)
        most_parked = max(most_parked, engine.num_parked)
    counted = counts.since()
    await scheduler.cancel()
    episodes = [outcome for outcome in outcomes if not isinstance(outcome, EpisodeFailed)]
    trajectories = [trajectory for episode in episodes for trajectory in episode]
    return {
        **counted,
        "num_failures": len(outcomes) - len(episodes),
        "most_parked": most_parked,
        "expected_prefill": sum(map(tokens_to_read, trajectories)),
        "num_cut": sum(trajectory.finish_reason != "completed" for trajectory in trajectories),
    }


def tokens_to_read(trajectory: Trajectory) -> int:
    """What the engine must read of an episode that it reads once: the prompt, and each answer with the mark before it,
    which was drawn last and is not in the cache."""
    return sum(turn.end - turn.start + (turn.role == "tool") for turn in trajectory.turns if turn.role != "policy")


async def _speak(engine: Engine, said: list[tuple[int, list[int]]]) -> None:
    for slot, ids in said:
        engine.begin_turn(slot, ids)
    while engine.busy:
        await engine.advance()


async def play_waiting(engine: Engine, num_sessions: int) -> dict[str, Any]:
    """All slots speak, all tools are waited for, all speak again."""
    counts = _Counts(engine.counters)
    reply = TOKENIZER.reply(ANSWER)
    for first in range(0, num_sessions, engine.num_free):
        numbers = range(first, min(first + engine.num_free, num_sessions))
        environments = [OneTool() for _ in numbers]
        slots = [engine.acquire(Request(key=request_key(0, number))) for number in numbers]
        openings = [TOKENIZER.opening(None, question(number)) for number in numbers]
        for said in (openings, [reply] * len(slots)):
            await _speak(engine, list(zip(slots, said, strict=True)))
            await asyncio.gather(*(environment.step("") for environment in environments))
        for slot in slots:
            engine.release(slot)
    return counts.since()


def measure(*, quick: bool) -> tuple[dict[str, Any], list[Goal]]:
    model = MODELS["small"]
    num_slots, num_sessions, num_rounds = (32, 96, 1) if quick else (64, 512, 3)
    actor = ActorConfig(
        num_slots=num_slots,
        context_tokens=1152,
        max_turns=2,
        max_turn_tokens=MAX_TURN,
        decode_rows=num_slots // 4,
        decode_row_sizes=3,
        context_sizes=3,
        prefill_rows=4,
        prefill_tokens=64,
    )
    engine = Engine(model, actor, weights_that_stop(model, MEAN_TURN), 0, end_of_turn=TOKENIZER.end_of_turn)
    asyncio.run(play_waiting(engine, num_slots))
    rounds = [
        (asyncio.run(play_scheduled(engine, num_sessions)), asyncio.run(play_waiting(engine, num_sessions)))
        for _ in range(num_rounds)
    ]
    ours = [scheduled for scheduled, _ in rounds]
    figures = {
        "num_slots": num_slots,
        "num_sessions": num_sessions,
        "tool_seconds": TOOL_SECONDS,
        "mean_turn": sum(each["policy_tokens"] for each in ours) / (2 * num_sessions * num_rounds),
        "kept": Sample.of(each["policy_tokens"] / each["decode_rows"] for each in ours),
        "recomputed_tokens": max(each["recomputed_tokens"] for each in ours),
        "prefill_surplus": max(abs(each["prefill_tokens"] - each["expected_prefill"]) for each in ours),
        "num_failures": max(each["num_failures"] for each in ours),
        "num_cut": max(each["num_cut"] for each in ours),
        "most_parked": max(each["most_parked"] for each in ours),
        "sessions_per_second": Sample.of(num_sessions / each["seconds"] for each in ours),
        "synchronous_sessions_per_second": Sample.of(num_sessions / each["seconds"] for _, each in rounds),
        "ours_over_synchronous": Sample.of(theirs["seconds"] / each["seconds"] for each, theirs in rounds),
        # Of both loops, Python's part included: the engine's work does not grow by refilling.
        "cpu_microseconds_per_token": Sample.of(1e6 * each["cpu_seconds"] / each["policy_tokens"] for each in ours),
        "synchronous_cpu_microseconds_per_token": Sample.of(
            1e6 * theirs["cpu_seconds"] / theirs["policy_tokens"] for _, theirs in rounds
        ),
    }
    return figures, goals_of(figures)


def goals_of(figures: dict[str, Any]) -> list[Goal]:
    return [
        Goal("two-turn episodes: kept policy tokens over decode rows", figures["kept"].median, GOAL_KEPT, True),
        Goal("two-turn episodes: tokens read again", figures["recomputed_tokens"], 0, False),
        Goal("two-turn episodes: tokens read beyond what was said", figures["prefill_surplus"], 0, False),
        Goal("two-turn episodes: failures", figures["num_failures"], 0, False),
    ]


def report(figures: dict[str, Any]) -> None:
    print(
        f"\nTwo-turn episodes, a tool of {figures['tool_seconds']} s: {figures['num_sessions']} sessions in "
        f"{figures['num_slots']} slots, {figures['mean_turn']:.0f} tokens a turn"
    )
    print(
        f"kept policy tokens over decode rows   {figures['kept']:.3f}; up to {figures['most_parked']} sessions parked"
    )
    print(
        f"tokens read again                     {figures['recomputed_tokens']}, beyond what was said {figures['prefill_surplus']}"
    )
    print(
        f"sessions/s                            {figures['sessions_per_second']:.1f}, waiting for all tools "
        f"{figures['synchronous_sessions_per_second']:.1f}: {figures['ours_over_synchronous']:.2f} times"
    )
    print(
        f"CPU microseconds per policy token     {figures['cpu_microseconds_per_token']:.0f}, waiting for all tools "
        f"{figures['synchronous_cpu_microseconds_per_token']:.0f}"
    )

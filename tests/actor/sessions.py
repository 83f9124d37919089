"""Sessions on a scripted engine, without an actor around them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tests.actor.scripted_engine import Script, ScriptedEngine
from tunix_core.actor.calls import Calls, run_loop
from tunix_core.actor.episodes import EpisodeSpec, Identity, Limits, Outcome
from tunix_core.actor.scheduler import MakeEnvironment, Scheduler
from tunix_core.tokenizer import ByteTokenizer, Tokenizer

IDENTITY = Identity(actor_id="a", incarnation="i", environment="scripted", temperature=1.0)
LIMITS = Limits(max_turns=4, max_forks=3, step_seconds=0.3, episode_seconds=30.0, max_observation_bytes=256)


def says(text: str, *, ends: bool = True) -> Script:
    """A policy that always says the same in bytes."""
    ids = ByteTokenizer().encode(text) + [ByteTokenizer.END_OF_TURN] * ends
    return lambda _random: list(ids)


def spec(member: int, group: str = "g") -> EpisodeSpec:
    return EpisodeSpec(group_id=group, group_size=8, member=member, task_id="0", task_seed=2 * member)


def play(
    environments: MakeEnvironment,
    *,
    script: Script,
    num_episodes: int = 1,
    num_slots: int = 8,
    limits: Limits = LIMITS,
    tokenizer: Tokenizer | None = None,
    engine: ScriptedEngine | None = None,
    meanwhile: Callable[[Scheduler], object] = lambda _scheduler: None,
    calls: Calls | None = None,
) -> tuple[list[Outcome | None], Scheduler]:
    """The outcomes in the order of their members; None of sessions that were abandoned.

    Args:
        meanwhile: called between dispatches.
    """
    tokenizer = tokenizer or ByteTokenizer()
    calls = calls or Calls(64)
    engine = engine or ScriptedEngine(script, num_slots=num_slots, end_of_turn=tokenizer.end_of_turn)
    outcomes: dict[int, Outcome] = {}
    found: list[Scheduler] = []

    async def run() -> None:
        scheduler = Scheduler(
            engine,
            IDENTITY,
            limits,
            environments,
            tokenizer,
            0,
            calls,
            lambda spec, outcome: outcomes.__setitem__(spec.member, outcome),
        )
        found.append(scheduler)
        waiting: Sequence[EpisodeSpec] = [spec(member) for member in range(num_episodes)]
        async with asyncio.timeout(240):
            while waiting or scheduler.num_sessions:
                while waiting and scheduler.num_free:
                    scheduler.start(waiting[0])
                    waiting = waiting[1:]
                await scheduler.step(0.05)
                meanwhile(scheduler)
        await scheduler.cancel()

    run_loop(run(), calls)
    assert engine.num_free == len(engine.transcripts.lengths), "a slot leaked"
    return [outcomes.get(member) for member in range(num_episodes)], found[0]

"""Many sessions on one engine: an asyncio task per episode, one dispatch at a time between them.

A session holds its slot, and the cache in it, from its start to its end: to give it up for the time of a tool
call would mean to read the whole conversation again. So a process plays `num_slots` sessions, as many as
its memory has room for, and what a waiting one costs is that room and nothing else. After each
dispatch the sessions whose turn ended run until they wait again; then the engine takes whatever has
become ready.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

import numpy as np

from tunix_core.actor.calls import Calls
from tunix_core.actor.episodes import EpisodeFailed, EpisodeSpec, Identity, Limits, Outcome
from tunix_core.actor.policy_engine import Conversation, PolicyEngine, Request, TurnEnd
from tunix_core.actor.sampling import request_key
from tunix_core.actor.session import Session, SessionCounters
from tunix_core.environments import Environment
from tunix_core.tokenizer import Tokenizer

MakeEnvironment = Callable[[int], Environment]
"""Makes the environment of one session from a seed for its latency and faults."""

_SETTLING_ROUNDS = 5
"""Rounds of the event loop after each dispatch: from a tool's answer to the next turn it takes a few."""

_CLOSING_SECONDS = 2.0
"""What environments may take to close when the process ends."""


class Scheduler:
    """Plays episodes in the engine's slots and reports each outcome.

    Args:
        engine: owned by this scheduler while it runs.
        identity: written into the trajectories.
        limits: of every episode.
        make_environment: called once per episode.
        tokenizer: frames the conversations; the engine ends a turn at its `end_of_turn`.
        run_seed: part of every request key.
        calls: of the event loop it runs on.
        finished: called with each episode's outcome, in the loop's thread.
        request: how conversations are sampled, each with a key of its own; by default at the identity's temperature.
    """

    def __init__(
        self,
        engine: PolicyEngine,
        identity: Identity,
        limits: Limits,
        make_environment: MakeEnvironment,
        tokenizer: Tokenizer,
        run_seed: int,
        calls: Calls,
        finished: Callable[[EpisodeSpec, Outcome], None],
        request: Request | None = None,
    ) -> None:
        self.engine = engine
        self.calls = calls
        self.counters = SessionCounters()
        self._identity = identity
        self._limits = limits
        self._make_environment = make_environment
        self._tokenizer = tokenizer
        self._run_seed = run_seed
        self._finished = finished
        self._request = request or Request(key=np.zeros(2, np.uint32), temperature=identity.temperature)
        self._sessions: dict[asyncio.Task[None], Session] = {}
        self._turns: dict[int, asyncio.Future[TurnEnd]] = {}
        self._ready = asyncio.Event()
        self._advance: asyncio.Task[list[TurnEnd]] | None = None
        self._error: BaseException | None = None

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_free(self) -> int:
        """Sessions that can be started now."""
        return self.engine.num_free

    @property
    def is_generating(self) -> bool:
        """Whether the engine is in the middle of a dispatch."""
        return self._advance is not None

    @property
    def oldest_seconds(self) -> float:
        """How long the oldest session has been going on."""
        now = time.monotonic()
        return max((now - session.started for session in self._sessions.values()), default=0.0)

    def start(self, spec: EpisodeSpec) -> None:
        """Begin an episode; there must be a free slot."""
        seat = _Seat(self, spec)
        seed = int.from_bytes(seat.key.tobytes(), "little")
        session = Session(
            spec,
            self._identity,
            self._limits,
            tokenizer=self._tokenizer,
            make_environment=lambda: self._make_environment(seed),
            calls=self.calls,
            seat=seat,
            counters=self.counters,
        )
        task = asyncio.get_running_loop().create_task(self._run(session, seat))
        self._sessions[task] = session
        task.add_done_callback(self._ended)

    def request(self, spec: EpisodeSpec, fork_index: int) -> Request:
        """How an episode's trajectory is sampled: each attempt and each fork draws anew."""
        fork = (fork_index,) if fork_index else ()
        key = request_key(self._run_seed, spec.episode_id, spec.attempt, *fork)
        return dataclasses.replace(self._request, key=key)

    async def speak(self, slot: int, ids: list[int], seconds: float) -> TurnEnd:
        """See `session.Seat`."""
        turn = asyncio.get_running_loop().create_future()
        self._turns[slot] = turn
        self.engine.begin_turn(slot, ids)
        self._ready.set()
        await asyncio.wait({turn}, timeout=seconds)
        if not turn.done():
            raise EpisodeFailed("episode_timeout", "the policy was still speaking")
        return turn.result()

    def release(self, slot: int) -> None:
        self._turns.pop(slot, None)
        self.engine.release(slot)

    def abandon(self, group_id: str) -> int:
        """End the sessions of a group, which have no outcome then; returns how many there were."""
        tasks = [task for task, session in self._sessions.items() if session.spec.group_id == group_id]
        for task in tasks:
            task.cancel()
        return len(tasks)

    async def step(self, max_wait_seconds: float) -> None:
        """One dispatch, if a slot has something to do; else wait for one. Returns after `max_wait_seconds` at the latest,
        a dispatch that takes longer goes on meanwhile, unless the engine holds up the event loop itself."""
        if self._error is not None:
            raise self._error
        if self._advance is None and not self.engine.busy:
            self._ready.clear()
            try:
                async with asyncio.timeout(max_wait_seconds):
                    await self._ready.wait()
            except TimeoutError:
                return
        if self._advance is None:
            self._advance = asyncio.get_running_loop().create_task(self._advanced())
        await asyncio.wait({self._advance}, timeout=max_wait_seconds)
        if self._advance.done():
            ended, self._advance = self._advance.result(), None
            for turn in ended:
                future = self._turns.pop(turn.slot, None)
                if future is not None and not future.done():
                    future.set_result(turn)
        for _ in range(_SETTLING_ROUNDS):
            await asyncio.sleep(0)

    async def cancel(self) -> None:
        """Abandon every session."""
        tasks = [*self._sessions, *([] if self._advance is None else [self._advance])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.calls.finish_closing(min(self._limits.step_seconds, _CLOSING_SECONDS))

    async def _advanced(self) -> list[TurnEnd]:
        return await self.engine.advance()

    async def _run(self, session: Session, seat: _Seat) -> None:
        outcome: Outcome
        try:
            outcome = await session.play()
        except EpisodeFailed as failure:
            outcome = failure
        finally:
            seat.leave()
            session.close()
        self._finished(session.spec, outcome)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._sessions[task]
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()
        self._ready.set()


class _Seat:
    """See `session.Seat`."""

    def __init__(self, scheduler: Scheduler, spec: EpisodeSpec) -> None:
        self._scheduler = scheduler
        self._engine = scheduler.engine
        self._spec = spec
        self._fork_index = 0
        request = scheduler.request(spec, 0)
        self.key = request.key
        self._slot = self._engine.acquire(request)

    @property
    def room(self) -> int:
        return self._engine.room(self._slot)

    @property
    def capacity(self) -> int:
        return self._engine.context_tokens - 1

    async def speak(self, ids: list[int], seconds: float) -> TurnEnd:
        return await self._scheduler.speak(self._slot, ids, seconds)

    def drawn(self, turn: TurnEnd) -> list[int]:
        tokens = self._engine.transcripts.tokens[self._slot, turn.start : turn.end - turn.stopped]
        return [int(token) for token in tokens]

    def conversation(self) -> Conversation:
        return self._engine.transcripts.conversation(self._slot)

    def fork(self) -> None:
        self._fork_index += 1
        self._scheduler.release(self._slot)
        self._slot = self._engine.acquire(self._scheduler.request(self._spec, self._fork_index))

    def leave(self) -> None:
        self._scheduler.release(self._slot)

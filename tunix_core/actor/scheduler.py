"""Many sessions on one engine: an asyncio task per episode, one dispatch at a time between them.

A session that waits for a tool costs a slot and nothing else. After each dispatch the sessions whose
turn ended run until they wait again; then the engine takes whatever has become ready.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import numpy as np

from tunix_core.actor.policy_engine import PolicyEngine, Request, TurnEnd
from tunix_core.actor.sampling import request_key
from tunix_core.actor.session import EpisodeFailed, EpisodeSpec, Identity, play
from tunix_core.environments import Environment
from tunix_core.tokenizer import Tokenizer
from tunix_core.types import Trajectory

Outcome = Trajectory | EpisodeFailed
MakeEnvironment = Callable[[int], Environment]
"""Makes the environment of one session from a seed for its latency and faults."""


class Scheduler:
    """Plays episodes in the engine's slots and reports each outcome.

    Args:
        engine: owned by this scheduler while it runs.
        identity: written into the trajectories.
        make_environment: called once per episode.
        tokenizer: frames the conversations; the engine ends a turn at its `end_of_turn`.
        run_seed: part of every request key.
        finished: called with each episode's outcome, in the loop's thread.
        request: how conversations are sampled, each with a key of its own; by default at the identity's temperature.
    """

    def __init__(
        self,
        engine: PolicyEngine,
        identity: Identity,
        make_environment: MakeEnvironment,
        tokenizer: Tokenizer,
        run_seed: int,
        finished: Callable[[EpisodeSpec, Outcome], None],
        request: Request | None = None,
    ) -> None:
        self.engine = engine
        self._identity = identity
        self._make_environment = make_environment
        self._tokenizer = tokenizer
        self._run_seed = run_seed
        self._finished = finished
        self._request = request or Request(key=np.zeros(2, np.uint32), temperature=identity.temperature)
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: dict[int, asyncio.Future[TurnEnd]] = {}
        self._ready = asyncio.Event()
        self._error: BaseException | None = None

    @property
    def num_sessions(self) -> int:
        return len(self._tasks)

    @property
    def num_free(self) -> int:
        """Sessions that can be started now."""
        return self.engine.num_free

    def start(self, spec: EpisodeSpec) -> None:
        """Begin an episode; there must be a free slot."""
        key = request_key(self._run_seed, spec.episode_id, spec.attempt)
        slot = self.engine.acquire(dataclasses.replace(self._request, key=key))
        environment = self._make_environment(int.from_bytes(key.tobytes(), "little"))
        task = asyncio.get_running_loop().create_task(self._run(spec, environment, slot))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def speak(self, slot: int, ids: list[int]) -> TurnEnd:
        """Let the policy speak in `slot` after `ids`; returns when its turn is over."""
        self.engine.begin_turn(slot, ids)
        self._ready.set()
        turn = asyncio.get_running_loop().create_future()
        self._turns[slot] = turn
        return await turn

    async def step(self, max_wait_seconds: float) -> None:
        """One dispatch, if a slot has something to do; else wait for one, at most so long."""
        if self._error is not None:
            raise self._error
        if not self.engine.busy:
            self._ready.clear()
            try:
                async with asyncio.timeout(max_wait_seconds):
                    await self._ready.wait()
            except TimeoutError:
                return
        for turn in await self.engine.advance():
            self._turns.pop(turn.slot).set_result(turn)
        await asyncio.sleep(0)

    async def cancel(self) -> None:
        """Abandon every session."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, spec: EpisodeSpec, environment: Environment, slot: int) -> None:
        outcome: Outcome
        try:
            outcome = await play(spec, self._identity, environment, self._tokenizer, self.engine, slot, self)
        except EpisodeFailed as failure:
            outcome = failure
        finally:
            self._turns.pop(slot, None)
            self.engine.release(slot)
            await environment.close()
        self._finished(spec, outcome)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()
        self._ready.set()

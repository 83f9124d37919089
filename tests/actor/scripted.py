"""A scripted learner and scripted environments for tests of whole actors."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.actor.scripted_engine import Script, ScriptedEngine
from tests.actor.support import ACTOR, MODEL, weights
from tunix_core.actor.loop import Actor, MakeEngine
from tunix_core.actor.scheduler import MakeEnvironment
from tunix_core.config import AlgorithmConfig, EnvironmentConfig, LearnerConfig, RunConfig
from tunix_core.environments import Environment, Observation, StepResult, ToolCall
from tunix_core.errors import EnvironmentFailure
from tunix_core.models.decoder import flatten_parameters
from tunix_core.storage.control import LearnerSignal, request_stop, write_learner_signal
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.store import ObjectStore
from tunix_core.storage.trajectory_reader import TrajectoryReader
from tunix_core.storage.writers import new_incarnation
from tunix_core.tokenizer import Tokenizer
from tunix_core.types import Trajectory

CONFIG = RunConfig(
    recipe="test",
    model=MODEL,
    environment=EnvironmentConfig(num_tasks=64, timeout_seconds=0.5),
    algorithm=AlgorithmConfig(group_size=4, temperature=0.8),
    learner=LearnerConfig(groups_per_batch=4, window_tokens=64),
    actor=dataclasses.replace(
        ACTOR,
        num_slots=8,
        task_block_size=4,
        flush_seconds=0.05,
        min_swap_seconds=0.05,
        poll_seconds=0.05,
        max_groups_per_shard=3,
        drain_seconds=0.0,
    ),
)


class ScriptedEnvironment:
    """Answers twice, then rewards a message's length modulo 2. `fault` may raise or hang in a step."""

    name = "scripted"

    def __init__(self, fault: Callable[[int], str], seed: int) -> None:
        self._fault = fault(seed)
        self._steps = 0

    async def reset(self, seed: int) -> Observation:
        self._steps = 0
        return Observation(f"go {seed % 10}")

    async def step(self, message: str) -> StepResult:
        self._steps += 1
        if self._fault == "raise":
            raise EnvironmentFailure("scripted")
        if self._fault == "crash":
            raise ZeroDivisionError("scripted")
        if self._fault == "hang":
            await asyncio.Event().wait()
        if self._steps < 2:
            return StepResult("ok", 0.0, False, (ToolCall("get", True),))
        answer = float(len(message) % 2)
        return StepResult("", answer, True, components={"answer": answer})

    async def close(self) -> None:
        pass


def no_fault(_seed: int) -> str:
    return ""


def scripted_engine(script: Script, **fields: Any) -> MakeEngine:
    """An engine without a model, in as many slots as the configuration has."""

    def make(config: RunConfig, _weights: Any, version: int, tokenizer: Tokenizer) -> ScriptedEngine:
        slots = config.actor.num_slots
        return ScriptedEngine(script, num_slots=slots, end_of_turn=tokenizer.end_of_turn, version=version, **fields)

    return make


def environments(fault: Callable[[int], str]) -> Callable[[int], Environment]:
    return lambda seed: ScriptedEnvironment(fault, seed)


class ScriptedLearner(threading.Thread):
    """Reads shards and grants `capacity` groups; publishes and stops as its script says.

    Args:
        script: called after each poll with this object; returns True to stop the run.
    """

    def __init__(self, store: ObjectStore, incarnation: str, capacity: int, script: Callable[[Any], bool]) -> None:
        super().__init__(daemon=True)
        self.store = store
        self.capacity = capacity
        self.clock = 0
        self.trajectories: list[Trajectory] = []
        self.shards: list[list[str]] = []
        """Group ids per shard."""
        self.error: BaseException | None = None
        current = PolicyStore(store).current()
        self.newest = -1 if current is None else current.version
        self.reads = True
        self.actor_ended = threading.Event()
        self.incarnation = incarnation
        self._script = script
        self._reader = TrajectoryReader(store)
        self._next = 0

    def run(self) -> None:
        try:
            self._follow()
        except BaseException as error:
            self.error = error
        finally:
            request_stop(self.store, reason="completed", source="learner", failed=False)

    def _follow(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            alone = self.actor_ended.is_set()
            for shard in self._reader.poll() if self.reads else []:
                assert shard.rows is not None, shard.fault
                rows = [shard.rows.trajectory(i) for i in range(shard.rows.num_rows)]
                self.trajectories += rows
                self.shards.append(list(dict.fromkeys(row.group_id for row in rows)))
                self._next = shard.sequence + 1
            write_learner_signal(self.store, self._signal())
            if self._script(self) or alone:
                return
            time.sleep(0.02)
        raise AssertionError("the script did not end within its time")

    def publish(self, version: int, seed: int) -> None:
        """Publish the weights of a seed; a version published before stays."""
        if version <= self.newest:
            return
        parent = self.newest if self.newest >= 0 else None
        self.newest = version
        PolicyStore(self.store).publish(
            version, flatten_parameters(weights(seed)), config={}, parent=parent, publisher="test", gate={}
        )

    def groups(self) -> dict[str, list[Trajectory]]:
        found: dict[str, list[Trajectory]] = {}
        for row in self.trajectories:
            found.setdefault(row.group_id, []).append(row)
        return found

    def _signal(self) -> LearnerSignal:
        return LearnerSignal(
            clock=self.clock,
            published_version=0,
            step_seconds=1.0,
            cursors={self.incarnation: self._next},
            live_incarnations=[self.incarnation],
            capacity_groups=self.capacity,
            target=1,
            state="stepping",
            learner_incarnation="learner",
            updated_at=time.time(),
        )


def run_actor(
    store: ObjectStore,
    script: Callable[[ScriptedLearner], bool],
    *,
    capacity: int = 6,
    config: RunConfig = CONFIG,
    fault: Callable[[int], str] = no_fault,
    interrupted: threading.Event | None = None,
    make_environment: MakeEnvironment | None = None,
    make_engine: MakeEngine | None = None,
    log: Callable[[str], None] = lambda _line: None,
) -> tuple[ScriptedLearner, Actor]:
    """One life of an actor against a scripted learner; returns when the actor has ended.

    Args:
        fault: of the scripted environment, by seed; or `make_environment` makes another one.
        make_engine: see `scripted_engine`; by default a small decoder.
    """
    incarnation = new_incarnation()
    learner = ScriptedLearner(store, incarnation, capacity, script)
    learner.publish(0, 0)
    actor = Actor(
        store,
        config,
        process="actor-0-0",
        incarnation=incarnation,
        interrupted=interrupted or threading.Event(),
        log=log,
        environments=make_environment or environments(fault),
        **({} if make_engine is None else {"make_engine": make_engine}),
    )
    learner.start()
    try:
        actor.run()
    finally:
        learner.actor_ended.set()
        learner.join()
    if learner.error is not None:
        raise learner.error
    return learner, actor

"""One hung episode blocked a batch for 29 hours (SkyRL #1173, slime #2399)."""

import asyncio
import dataclasses
import threading
import time
from collections import Counter

import pytest

from tests.actor.scripted import CONFIG, ScriptedEnvironment, ScriptedLearner, no_fault, run_actor, scripted_engine
from tests.actor.sessions import says
from tunix_core.environments import Observation, StepResult
from tunix_core.storage.store import open_store, read_json

GROUP_SECONDS = 2.0
"""Deadline of a group; a step alone could take for ever here."""


class Hangs(ScriptedEnvironment):
    """The first member that begins the second or the fourth task never returns from its step, deaf to cancellation."""

    begun: set[int]
    guard = threading.Lock()

    async def reset(self, seed: int) -> Observation:
        with self.guard:
            self._is_first = seed not in self.begun
            self.begun.add(seed)
            self._number = len(self.begun)
        return await super().reset(seed)

    async def step(self, message: str) -> StepResult:
        while self._is_first and self._number in (2, 4):
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue
        return await super().step(message)


def test_hanging_environment_does_not_stall(tmp_path) -> None:
    """A worker crashes, and in the next one two members hang for ever: all groups arrive, theirs within the deadline."""
    store = open_store(str(tmp_path))
    actor = dataclasses.replace(
        CONFIG.actor, episode_timeout_seconds=GROUP_SECONDS, group_timeout_seconds=GROUP_SECONDS
    )
    environment = dataclasses.replace(CONFIG.environment, timeout_seconds=GROUP_SECONDS)
    config = dataclasses.replace(CONFIG, actor=actor, environment=environment)

    with pytest.raises(RuntimeError, match="scripted crash"):
        run_actor(
            store,
            lambda _learner: False,
            config=config,
            make_engine=scripted_engine(says("hi"), dies_after=20),
        )
    store.delete("control/stop.json")

    Hangs.begun = set()
    arrived: dict[str, float] = {}

    def script(learner: ScriptedLearner) -> bool:
        for group in own(learner):
            arrived.setdefault(group, time.monotonic())
        return len(arrived) >= 12 and len(incomplete(learner)) == 2

    started = time.monotonic()
    learner, second = run_actor(
        store,
        script,
        config=config,
        capacity=4,
        make_environment=lambda _seed: Hangs(no_fault, 0),
        make_engine=scripted_engine(says("hi")),
    )
    told = second.progress()
    assert len(incomplete(learner)) == 2
    # Hanging groups wait for their deadline and the flush, and for nothing else; the margin is for a busy machine.
    assert max(arrived[group] for group in incomplete(learner)) - started < GROUP_SECONDS + 20
    assert told["lost_episodes"] == told["failures"]["group_timeout"] == told["late_groups"] == 2
    assert told["abandoned_calls"] == 2
    claims = [read_json(store, key)["claims"] for key in store.list_after("tasks/0")]
    assert max(claims) == 2, "what the crashed worker had begun is taken up"


def own(learner: ScriptedLearner) -> dict[str, int]:
    """Group -> episodes, as the learner's own actor delivered it: one that takes up a block plays all of it."""
    return Counter(row.group_id for row in learner.trajectories if row.incarnation == learner.incarnation)


def incomplete(learner: ScriptedLearner) -> list[str]:
    return [group for group, size in own(learner).items() if size < CONFIG.algorithm.group_size]

"""An actor between a learner that filters what it reads and weights that come faster than episodes end."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

from tests.actor.scripted import CONFIG, ScriptedLearner, run_actor, scripted_engine
from tests.actor.sessions import says
from tunix_core.environments import Observation, StepResult
from tunix_core.rl.pacing import capacity_groups
from tunix_core.storage.control import read_heartbeat
from tunix_core.storage.store import open_store


class Paid:
    """One message an episode. One task in eight pays its members unlike, the others pay all of them nothing."""

    name = "paid"

    def __init__(self, seed: int) -> None:
        self._seed = seed

    async def reset(self, seed: int) -> Observation:
        self._reward = float(seed // 2 % 8 == 0 and self._seed % 2 == 0)
        return Observation("go")

    async def step(self, _message: str) -> StepResult:
        return StepResult("", self._reward, True)

    async def close(self) -> None:
        pass


def test_groups_that_the_learner_filters_out_are_made_up_for_by_its_capacity(tmp_path) -> None:
    """Dynamic sampling drops seven groups of eight: they are read, so they are no longer in flight, and more may begin."""
    batch, steps = 2, []

    def script(learner: ScriptedLearner) -> bool:
        with_signal = [rows for rows in learner.groups().values() if len({row.reward for row in rows}) > 1]
        queued = len(with_signal) - batch * len(steps)
        if queued >= batch:
            steps.append(len(learner.groups()))
            queued -= batch
        learner.capacity = capacity_groups(target=0, groups_per_batch=batch, queued_fresh=queued, in_step=0)
        return len(steps) == 2

    run_actor(
        open_store(str(tmp_path)),
        script,
        capacity=batch,
        make_environment=Paid,
        make_engine=scripted_engine(says("hi")),
    )
    assert steps[-1] > 2 * 2 * batch, "most groups were filtered out, and yet two batches came together"


class Waits:
    """The first eight sessions wait until they are let go."""

    name = "waits"
    go = threading.Event()
    num_begun = 0

    def __init__(self, _seed: int) -> None:
        type(self).num_begun += 1
        self._waits = self.num_begun <= 8

    async def reset(self, _seed: int) -> Observation:
        return Observation("go")

    async def step(self, _message: str) -> StepResult:
        while self._waits and not self.go.is_set():
            await asyncio.sleep(0.01)
        return StepResult("", 1.0, True)

    async def close(self) -> None:
        pass


def test_no_group_begins_while_newer_weights_cannot_become_resident(tmp_path) -> None:
    """Version 0 is held by episodes that last, 1 is resident beside it, 2 waits: what began now would be stale."""
    Waits.go, Waits.num_begun = threading.Event(), 0
    polls: list[int] = []

    def script(learner: ScriptedLearner) -> bool:
        beat = read_heartbeat(learner.store, "actor-0-0")
        if beat is None or Waits.num_begun < 8:
            return False
        learner.publish(1, 1)
        if beat.progress["version"] == 1:
            learner.publish(2, 2)
            polls.append(Waits.num_begun)
        if len(polls) == 25:  # the actor has the weights by now: it polls twice as often as this one's script
            learner.capacity = 4
        if len(polls) == 75:
            Waits.go.set()
        return {row.policy_version_max for row in learner.trajectories} >= {0, 2}

    config = dataclasses.replace(
        CONFIG,
        actor=dataclasses.replace(CONFIG.actor, num_slots=16, poll_seconds=0.01),
        environment=dataclasses.replace(CONFIG.environment, timeout_seconds=60.0),
    )
    learner, actor = run_actor(
        open_store(str(tmp_path)),
        script,
        capacity=2,
        config=config,
        make_environment=Waits,
        make_engine=scripted_engine(says("hi"), keeps_versions=True),
    )
    assert set(polls[:75]) == {8}, "eight slots were free and two more groups allowed"
    assert {row.policy_version_max for row in learner.trajectories} == {0, 2}
    assert actor.progress()["swaps"] == 2

"""The whole actor, on a scripted engine, against environments that break in every way at once."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import resource
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.actor.scripted import CONFIG, ScriptedLearner, run_actor, scripted_engine
from tests.actor.sessions import says
from tunix_core.config import RunConfig
from tunix_core.environments import Observation, StepResult
from tunix_core.errors import EnvironmentFailure, Interrupted
from tunix_core.storage.control import read_heartbeat
from tunix_core.storage.store import open_store, read_json
from tunix_core.storage.writers import read_writers

HUNDRED_MB = "x" * 100_000_000

STEP_SECONDS = 1.0


def config(**actor: Any) -> RunConfig:
    environment = dataclasses.replace(CONFIG.environment, timeout_seconds=STEP_SECONDS)
    return dataclasses.replace(
        CONFIG, environment=environment, actor=dataclasses.replace(CONFIG.actor, **{"num_slots": 64, **actor})
    )


class Injured:
    """Every step breaks with the chances of the test; `injured` counts what was done."""

    name = "injured"
    injured: Counter[str]
    release: threading.Event
    lock = threading.Lock()

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._steps = 0

    async def reset(self, _seed: int) -> Observation:
        return Observation("go")

    async def step(self, _message: str) -> StepResult:
        self._steps += 1
        await asyncio.sleep(0.001)
        chance = self._random.random()
        for kind, share in (("raise", 0.10), ("await", 0.004), ("swallow", 0.003), ("thread", 0.003), ("huge", 0.01)):
            if chance < share:
                self.injured[kind] += 1
                return await getattr(self, f"_{kind}")()
            chance -= share
        if self._steps < 3:
            return StepResult("ok", 0.0, False)
        self.injured["done"] += 1
        return StepResult("", 1.0, True)

    async def close(self) -> None:
        self.injured["close"] += 1

    async def _raise(self) -> StepResult:
        raise EnvironmentFailure("scripted")

    async def _await(self) -> StepResult:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def _swallow(self) -> StepResult:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    async def _thread(self) -> StepResult:
        await asyncio.to_thread(self.release.wait)
        raise AssertionError("unreachable")

    async def _huge(self) -> StepResult:
        return StepResult(HUNDRED_MB, 0.0, False)


@pytest.fixture
def injured() -> Iterator[Counter[str]]:
    Injured.injured, Injured.release = Counter(), threading.Event()
    yield Injured.injured
    Injured.release.set()


def ends_with_all_read(num_groups: int) -> Any:
    """A script: so many groups are allowed, the last ones are waited for, and nothing is under way at the end."""
    seen = []

    def script(learner: ScriptedLearner) -> bool:
        beat = read_heartbeat(learner.store, "actor-0-0")
        if beat is None:
            return False
        closed, in_flight = beat.progress["closed_groups"], beat.progress["groups_in_flight"]
        if closed + in_flight >= num_groups:
            learner.capacity = 0
        # The last outcome is in the heartbeat after the one that shows nothing in flight.
        seen.append(closed if in_flight == 0 and learner.capacity == 0 else -len(seen))
        return len(seen) > 50 and len(set(seen[-50:])) == 1

    return script


def test_the_run_goes_on_and_every_fault_is_counted(tmp_path, injured: Counter[str]) -> None:
    """10 % of steps raise, 1 % hang for ever (awaiting, deaf to cancellation, in a thread), 1 % return 100 MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    learner, actor = run_actor(
        open_store(str(tmp_path)),
        ends_with_all_read(80),
        capacity=12,
        config=config(max_abandoned_calls=1000, max_turn_tokens=16, context_tokens=64),
        make_environment=Injured,
        make_engine=scripted_engine(says("hi")),
    )
    told = actor.progress()
    group_size = CONFIG.algorithm.group_size

    hung = injured["await"] + injured["swallow"] + injured["thread"]
    assert min(injured[kind] for kind in ("raise", "await", "swallow", "thread", "huge")) >= 1
    assert told["failures"] == {"environment_failure": injured["raise"], "environment_timeout": hung}
    assert told["failed_attempts"] == injured["raise"] + hung
    assert told["abandoned_calls"] == told["abandoned_calls_ever"] == injured["swallow"] + injured["thread"]
    assert told["cut_observations"] == injured["huge"]
    assert told["finish_reasons"].pop("completed") == injured["done"]
    assert set(told["finish_reasons"]) <= {"max_tokens", "max_turns"}, "a cut answer is still too long for the context"
    assert told["episodes"] == injured["done"] + injured["huge"]
    assert told["closed_groups"] * group_size == told["episodes"] + told["lost_episodes"]
    assert injured["close"] == told["episodes"] + told["failed_attempts"]

    delivered = {group: len(rows) for group, rows in learner.groups().items()}
    assert min(delivered.values()) >= 2
    assert len(delivered) == told["closed_groups"] - told["dropped_groups"]
    in_dropped = told["episodes"] - sum(delivered.values())
    assert 0 <= in_dropped <= told["dropped_groups"]
    said = [message["content"] for row in learner.trajectories for message in json.loads(row.messages)]
    assert max(map(len, said)) <= CONFIG.actor.max_observation_bytes
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 150_000, f"{grown} kB: a large answer was copied"


@pytest.mark.usefixtures("injured")
def test_too_many_abandoned_calls_end_the_process_so_that_another_begins(tmp_path) -> None:
    class Deaf(Injured):
        async def step(self, _message: str) -> StepResult:
            return await self._swallow()

    store = open_store(str(tmp_path))
    lines: list[str] = []
    with pytest.raises(EnvironmentFailure, match=r"accepted at most 5 \(actor.max_abandoned_calls\)"):
        run_actor(
            store,
            lambda _learner: any(writer.closed for writer in read_writers(store)),
            config=config(max_abandoned_calls=5),
            make_environment=Deaf,
            make_engine=scripted_engine(says("hi")),
            log=lines.append,
        )
    assert EnvironmentFailure.retryable
    assert "calls abandoned" in lines[-1]
    assert any(line.startswith("first failure of its kind: environment_timeout") for line in lines)


@pytest.mark.usefixtures("injured")
def test_an_environment_that_is_down_does_not_use_up_the_tasks(tmp_path) -> None:
    """Each dropped group doubles the pause before the next: in two seconds, about four of hundreds."""

    class Down(Injured):
        async def reset(self, _seed: int) -> Observation:
            raise ConnectionError("scripted")

    def script(learner: ScriptedLearner) -> bool:
        beat = read_heartbeat(learner.store, "actor-0-0")
        return beat is not None and beat.progress["dropped_groups"] >= 3

    _, actor = run_actor(
        open_store(str(tmp_path)),
        script,
        capacity=4,
        config=config(),
        make_environment=Down,
        make_engine=scripted_engine(says("hi")),
    )
    told = actor.progress()
    assert told["dropped_groups"] <= 8
    assert told["failures"] == {"environment_ConnectionError": told["failed_attempts"]}


@pytest.mark.usefixtures("injured")
def test_a_signal_lets_groups_end_that_soon_do(tmp_path) -> None:
    """What ends within `drain_seconds` is written, what does not is left to the next life: its tasks are not done."""
    store, interrupted = open_store(str(tmp_path)), threading.Event()

    class Slow(Injured):
        async def step(self, _message: str) -> StepResult:
            started.append(1)
            if len(started) == 8:
                interrupted.set()
            await asyncio.sleep(0.3 if len(started) <= 8 else 30)
            return StepResult("", 1.0, True)

    started: list[int] = []
    settings = config(drain_seconds=3.0, num_slots=8)
    settings = dataclasses.replace(
        settings, environment=dataclasses.replace(settings.environment, timeout_seconds=60.0)
    )
    with pytest.raises(Interrupted):
        run_actor(
            store,
            lambda _learner: any(writer.closed for writer in read_writers(store)),
            capacity=8,
            config=settings,
            interrupted=interrupted,
            make_environment=Slow,
            make_engine=scripted_engine(says("hi")),
        )
    (writer,) = read_writers(store)
    assert writer.next_sequence >= 1, "the two groups that were under way are written"
    blocks = [read_json(store, key) for key in store.list_after("tasks/0")]
    assert not any(block["finished"] for block in blocks)
    beat = read_heartbeat(store, "actor-0-0")
    assert beat is not None
    assert (beat.progress["episodes"], beat.progress["closed_groups"]) == (8, 2)

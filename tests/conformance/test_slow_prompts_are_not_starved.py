"""Discard and requeue favoured short episodes (tinker-cookbook #822)."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading

import numpy as np
from scipy.stats import ks_2samp

from tests.actor.scripted import CONFIG, ScriptedLearner, run_actor, scripted_engine
from tests.actor.sessions import says
from tunix_core.environments import Observation, StepResult
from tunix_core.simulation.setting import Setting
from tunix_core.simulation.simulate import simulate
from tunix_core.storage.store import open_store

NUM_GROUPS = 110


def num_steps(seed: int) -> int:
    """Of a task: one in two takes about six times as long."""
    rng = random.Random(seed)
    return rng.choice([rng.randint(1, 2), rng.randint(7, 10)])


class Bimodal:
    name = "bimodal"
    begun: dict[int, int]
    lock = threading.Lock()

    def __init__(self, _seed: int) -> None:
        self._left = 0

    async def reset(self, seed: int) -> Observation:
        self._left = num_steps(seed)
        with self.lock:
            self.begun.setdefault(seed, self._left)
        return Observation("go")

    async def step(self, _message: str) -> StepResult:
        self._left -= 1
        await asyncio.sleep(0.002)
        return StepResult("more", float(not self._left), not self._left)

    async def close(self) -> None:
        pass


def test_slow_prompts_are_not_starved(tmp_path) -> None:
    """Nothing is stale here: what arrives is distributed as what was begun, though slow groups overtake no one."""
    Bimodal.begun = {}
    config = dataclasses.replace(
        CONFIG, actor=dataclasses.replace(CONFIG.actor, num_slots=24, max_turns=20, task_block_size=16)
    )

    def script(learner: ScriptedLearner) -> bool:
        return len(learner.groups()) >= NUM_GROUPS

    learner, actor = run_actor(
        open_store(str(tmp_path)),
        script,
        capacity=6,
        config=config,
        make_environment=Bimodal,
        make_engine=scripted_engine(says("hi")),
    )
    groups = learner.groups().values()
    assert all(len(rows) == CONFIG.algorithm.group_size for rows in groups)
    arrived = [num_steps(rows[0].task_seed) for rows in groups]
    begun = list(Bimodal.begun.values())
    assert min(arrived.count(n) for n in (1, 2, 7, 10)) > 0
    assert len(begun) - len(arrived) <= 6 + 3, "what is missing is under way, or in a last shard"
    assert ks_2samp(arrived, begun).pvalue > 0.2
    # Of the tasks begun before all that is still under way, every one has arrived.
    assert actor.progress()["lost_episodes"] == 0
    # The same sizes with the slow half thinned out are told apart: the test can fail.
    thinned = [n for place, n in enumerate(arrived) if n < 7 or place % 3 == 0]
    assert ks_2samp(thinned, begun).pvalue < 0.05


def bimodal_groups(generator: np.random.Generator, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Three of ten groups take 20 s, two steps of the learner, the others 3 s; tokens in proportion."""
    typical = np.where(generator.random(num) < 0.3, 20.0, 3.0)
    seconds = typical * generator.lognormal(0.0, 0.3, num)
    return seconds, 50 * seconds


def test_where_groups_go_stale_the_long_ones_bear_little_of_it() -> None:
    """By tenths of length, with the pacing's own code; a published rule's discards, and a bound that fits, beside it."""
    ours = simulate(Setting(duration_seconds=700.0), bimodal_groups).discarded_by_length
    assert max(ours[:9]) < 0.01
    assert 0.0 < ours[9] < 0.35

    published = Setting(
        duration_seconds=700.0, strategy="fixed", target=4, count_step=False, order="first_in_first_out"
    )
    theirs = simulate(published, bimodal_groups).discarded_by_length
    assert min(theirs[7:]) > 0.5, "capacity at the bound, first in first out, starves every slow group"

    roomy = simulate(Setting(duration_seconds=700.0, max_staleness=8), bimodal_groups)
    assert max(roomy.discarded_by_length) == 0.0, "max_staleness >= p97(group seconds) / step seconds"
    assert roomy.busy_fraction > 0.95

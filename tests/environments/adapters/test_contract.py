"""The protocol of `environments/base.py`, kept by every adapter whose package is installed."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.environments.adapters.support import Policy, guesses, made, play, play_all, say
from tunix_core.environment_config import (
    EnvironmentOptions,
    GemOptions,
    GymnasiumOptions,
    OpenEnvOptions,
    ReasoningGymOptions,
    Table,
    TextArenaOptions,
    VerifiersOptions,
)
from tunix_core.environments import task_seed
from tunix_core.environments.adapters import blocking
from tunix_core.environments.base import Environment
from tunix_core.errors import ConfigError, EnvironmentFailure


class Case(NamedTuple):
    """A real task of an installed package, and how it is solved."""

    name: str
    package: str
    extra: str
    options: EnvironmentOptions
    solve: Callable[[Environment, int], Policy]
    """Earns `full` with the seed's task."""
    malformed: str
    """Read by nobody, and told so."""
    full: float = 1.0
    openings_differ: bool = True


def _demonstrated(environment: Environment, seed: int) -> Policy:
    return say(*(text for role, text in environment.demonstration(seed) if role == "policy"))


def _sum(_environment: Environment, _seed: int) -> Policy:
    def policy(read: list[str]) -> str:
        left, right = map(int, re.findall(r"\d+", read[0]))
        return rf"\boxed{{{left + right}}}"

    return policy


CASES = {
    "reasoning_gym": Case(
        "reasoning_gym", "reasoning_gym", "reasoning-gym", ReasoningGymOptions(), _demonstrated, "no tags"
    ),
    "gymnasium": Case(
        "gymnasium",
        "gymnasium",
        "gymnasium",
        GymnasiumOptions(arguments=Table(is_slippery=False)),
        lambda _environment, _seed: say("down", "down", "right", "right", "down", "right"),
        "fly",
        openings_differ=False,
    ),
    "textarena": Case(
        "textarena",
        "textarena",
        "textarena",
        TextArenaOptions(),
        lambda _environment, _seed: guesses(1, 20, "[{}]"),
        "no brackets",
        openings_differ=False,
    ),
    "gem": Case("gem", "gem", "gem", GemOptions(), lambda _environment, _seed: guesses(1, 20, r"\boxed{{{}}}"), ""),
    "verifiers": Case("verifiers", "verifiers", "verifiers", VerifiersOptions(taskset="sums"), _sum, ""),
    "openenv": Case(
        "openenv",
        "openenv",
        "openenv",
        OpenEnvOptions(observation_field="text"),
        lambda _environment, _seed: guesses(1, 20, "{}"),
        "x" * 41,
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    found = CASES[request.param]
    pytest.importorskip(found.package, reason=f"the extra {found.extra} is not installed")
    if found.name == "verifiers":
        request.getfixturevalue("tasksets")
    if found.name == "openenv":
        url = request.getfixturevalue("openenv_url")
        return found._replace(options=OpenEnvOptions(url=url, observation_field="text"))
    return found


def test_a_seed_names_a_task(case: Case) -> None:
    """Twice the same, whatever happened to the process's own generators meanwhile."""
    seeds = [task_seed(split, index, 0) for split in ("train", "held_out") for index in range(4)]

    def played(seed: int) -> object:
        environment = made(case.name, case.options)
        return asyncio.run(play(environment, seed, case.solve(environment, seed)))

    openings = [[played(seed) for seed in seeds] for _ in range(2)]
    assert openings[0] == openings[1]
    if case.openings_differ:
        assert len({first.text for first, _ in openings[0]}) > 1


def test_the_right_messages_earn_the_full_reward(case: Case) -> None:
    for index in range(5):
        environment = made(case.name, case.options)
        seed = task_seed("train", index, 0)
        first, results = asyncio.run(play(environment, seed, case.solve(environment, seed)))
        assert first.text
        assert [result.done for result in results] == [False] * (len(results) - 1) + [True]
        assert sum(result.reward for result in results) == pytest.approx(case.full)
        assert (results[-1].text, results[-1].truncated) == ("", False)
        assert all(result.text for result in results[:-1])
        assert results[-1].components
        assert all(isinstance(value, float) for value in results[-1].components.values())


def test_a_malformed_message_is_an_observation(case: Case) -> None:
    if not case.malformed:
        pytest.skip("it reads every message: what it cannot use ends the episode by its own rules")
    seed = task_seed("train", 1, 0)
    environment = made(case.name, case.options)
    _, (result,) = play_all(environment, seed, case.malformed)
    assert (result.reward, result.done) == (0.0, False)
    assert result.text
    assert result.components["malformed_calls"] == 1
    # The task is as it was.
    again = made(case.name, case.options)
    solve = case.solve(again, seed)
    policy = lambda read: case.malformed if len(read) == 1 else solve([read[0], *read[2:]])  # noqa: E731
    _, results = asyncio.run(play(again, seed, policy))
    assert sum(result.reward for result in results) == pytest.approx(case.full)


def test_a_step_needs_a_reset_and_an_open_episode(case: Case) -> None:
    async def go() -> None:
        environment = made(case.name, case.options)
        with pytest.raises(EnvironmentFailure, match="before reset"):
            await environment.step("x")
        await environment.close()

    asyncio.run(go())


def test_sixty_four_sessions_share_a_loop(case: Case) -> None:
    """Each plays its own task to the end, and the loop keeps turning meanwhile."""
    turns: list[float] = []

    async def watch() -> None:
        while True:
            turns.append(time.monotonic())
            await asyncio.sleep(0.001)

    async def go() -> list[float]:
        watcher = asyncio.create_task(watch())
        sessions = []
        for index in range(64):
            environment, seed = made(case.name, case.options), task_seed("train", index, 0)
            policy = await asyncio.to_thread(case.solve, environment, seed)
            sessions.append(play(environment, seed, policy))
        played = await asyncio.gather(*sessions)
        watcher.cancel()
        return [sum(result.reward for result in results) for _, results in played]

    assert asyncio.run(go()) == pytest.approx([case.full] * 64)
    assert len(turns) > 20


@pytest.mark.parametrize("name", CASES)
def test_a_missing_package_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = blocking.require_package.__globals__["importlib"].util.find_spec
    absent = CASES[name].package
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None if module == absent else find(module))
    with pytest.raises(ConfigError, match=re.escape(f"tunix-airflow[{CASES[name].extra}]")):
        made(name, CASES[name].options)

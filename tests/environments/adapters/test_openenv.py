from __future__ import annotations

import asyncio
import json
import time

import pytest

from tests.environments.adapters.support import guesses, made, openenv_server, play, play_all
from tunix_core.environment_config import OpenEnvOptions, Table
from tunix_core.environments import task_seed
from tunix_core.errors import ConfigError, EnvironmentFailure
from tunix_core.processes import free_port

pytest.importorskip("openenv", reason="the extra openenv is not installed")

SEED = task_seed("train", 0, 0)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="url"):
        OpenEnvOptions(url="127.0.0.1:8000")


def test_whole_observations_and_json_actions(openenv_url: str) -> None:
    options = OpenEnvOptions(url=openenv_url, action_field="", reset=Table(largest=1), instructions="Guess.")
    first, results = play_all(made("openenv", options), SEED, "1", "[]", '{"message": "x"}', '{"message": "1"}')
    assert first.instructions == "Guess."
    assert json.loads(first.text)["text"] == f"A number from 1 to 1; task {SEED}."
    assert [result.components["malformed_calls"] for result in results] == [1, 2, 2, 2]
    assert json.loads(results[2].text)["text"] == "digits!"
    assert (results[3].reward, results[3].done, results[3].text) == (1.0, True, "")
    assert results[3].components == {"return": 1.0, "actions": 2.0, "malformed_calls": 2.0}


def test_a_missing_field_is_named(openenv_url: str) -> None:
    with pytest.raises(EnvironmentFailure, match=r"received 'hint', accepted .*text"):
        play_all(made("openenv", OpenEnvOptions(url=openenv_url, observation_field="hint")), SEED)


def test_a_late_answer_and_a_raising_environment_fail_the_episode(openenv_url: str) -> None:
    slow = OpenEnvOptions(url=openenv_url, observation_field="text", step_seconds=0.3)
    started = time.monotonic()
    with pytest.raises(EnvironmentFailure, match=r"no answer within 0\.3 s"):
        play_all(made("openenv", slow), SEED, "sleep")
    assert time.monotonic() - started < 4
    with pytest.raises(EnvironmentFailure, match="EXECUTION_ERROR"):
        play_all(made("openenv", OpenEnvOptions(url=openenv_url)), SEED, "crash")


def test_a_cancelled_step_leaves_a_session_that_can_be_closed(openenv_url: str) -> None:
    async def go() -> float:
        environment = made("openenv", OpenEnvOptions(url=openenv_url))
        await environment.reset(SEED)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await environment.step("sleep")
        started = time.monotonic()
        with pytest.raises(EnvironmentFailure, match="broke"):
            await environment.step("1")  # never on a connection that was not reset
        await environment.close()
        return time.monotonic() - started

    assert asyncio.run(go()) < 8


def test_a_server_that_dies_fails_the_episode_and_the_next_reset_finds_the_new_one() -> None:
    with openenv_server() as (url, process):
        options = OpenEnvOptions(url=url, observation_field="text", connect_attempts=2)

        async def go() -> None:
            environment = made("openenv", options)
            await environment.reset(SEED)
            with pytest.raises(EnvironmentFailure, match="broke"):
                await environment.step("die")
            with pytest.raises(EnvironmentFailure, match="step before reset, or after the connection broke"):
                await environment.step("1")
            await environment.close()

        asyncio.run(go())
        assert process.wait(10) == 1
        started = time.monotonic()
        with pytest.raises(EnvironmentFailure, match="no session at"):
            play_all(made("openenv", options), SEED)
        assert time.monotonic() - started > 0.2, "it asked twice"


def test_a_reset_waits_while_the_server_is_full() -> None:
    with openenv_server(sessions=1) as (url, _):
        options = OpenEnvOptions(url=url, observation_field="text", connect_attempts=8)

        async def go() -> float:
            first, second = made("openenv", options), made("openenv", options)
            await first.reset(SEED)
            waiting = asyncio.create_task(play(second, SEED, guesses(1, 20, "{}")))
            await asyncio.sleep(0.5)
            assert not waiting.done(), "the server has one session, which is taken"
            await first.close()
            _, results = await waiting
            return sum(result.reward for result in results)

        assert asyncio.run(go()) == 1.0


def test_nobody_there() -> None:
    options = OpenEnvOptions(url=f"ws://127.0.0.1:{free_port()}", connect_attempts=1)
    with pytest.raises(EnvironmentFailure, match="no session at"):
        play_all(made("openenv", options), SEED)

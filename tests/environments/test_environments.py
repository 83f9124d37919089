import asyncio
import dataclasses

import pytest

from tunix_core.environment_config import CalculatorOptions, EnvironmentConfig, EnvironmentOptions, LookupOptions
from tunix_core.environments import make_environment, split_of, task_seed
from tunix_core.environments.base import ToolWeather
from tunix_core.errors import ConfigError, EnvironmentFailure

NAMES = ("lookup", "calculator")


def config(name: str, **fields: object) -> EnvironmentConfig:
    return dataclasses.replace(EnvironmentConfig(name=name, latency_mean_seconds=0.0), **fields)


def options(name: str, digits: int, keys: int) -> EnvironmentOptions:
    return LookupOptions(num_digits=digits, num_keys=keys) if name == "lookup" else CalculatorOptions(num_digits=digits)


def play(environment, seed, messages):
    async def go():
        first = await environment.reset(seed)
        return first, [await environment.step(text) for text in messages]

    return asyncio.run(go())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("index", range(5))
def test_a_demonstration_earns_the_reward(name: str, index: int) -> None:
    environment = make_environment(config(name))
    seed = task_seed("train", index, 0)
    script = environment.demonstration(seed)
    first, results = play(environment, seed, [text for role, text in script if role == "policy"])
    assert script[0] == ("prompt", first.text)
    assert [result.text for result in results[:-1]] == [text for role, text in script if role == "tool"]
    assert [result.done for result in results] == [False] * (len(results) - 1) + [True]
    assert results[-1].reward == 1.0
    assert results[-1].components["answer"] == 1.0
    assert results[-1].components["malformed_calls"] == 0
    assert all(result.reward == 0 for result in results[:-1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text", ["", "get", "get  c", "calc 1+", "calc 1/0", "get<pad> c", "= ", "=483", "\x00", "9" * 50]
)
def test_a_malformed_call_is_an_observation(name: str, text: str) -> None:
    _, results = play(make_environment(config(name)), 4, [text, text])
    assert [result.text for result in results] == ["?", "?"]
    assert not results[1].done
    assert not results[1].tool_calls
    assert results[1].components["malformed_calls"] == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_answer_ends_the_episode_without_reward(name: str) -> None:
    environment = make_environment(config(name))
    answer = environment.demonstration(4)[-1][1]
    _, (result,) = play(environment, 4, [answer + "0"])
    assert (result.done, result.reward) == (True, 0.0)


def test_an_unknown_key_is_a_failed_tool_call() -> None:
    environment = make_environment(config("lookup"))
    used = {text[-1] for role, text in environment.demonstration(4) if text.startswith("get")}
    other = next(key for key in "abcdefgh" if key not in used)
    _, (result,) = play(environment, 4, [f"get {other}"])
    assert (result.text, result.tool_calls) == ("?", (("get", False),))
    assert result.components["malformed_calls"] == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("digits", "keys"), [(1, 3), (3, 16)])
def test_splits_share_no_instance(name: str, digits: int, keys: int) -> None:
    environment = make_environment(config(name, options=options(name, digits, keys)))
    tasks = {
        split: {environment.task(task_seed(split, index, 3)) for index in range(300)} for split in ("train", "held_out")
    }
    assert tasks["train"]
    assert tasks["held_out"]
    assert not tasks["train"] & tasks["held_out"]


def test_task_seeds_are_stable_and_distinct() -> None:
    seeds = {task_seed(split, index, run) for split in ("train", "held_out") for index in range(100) for run in (0, 1)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert task_seed("held_out", 7, 1) == 6327693230831148449
    assert split_of(task_seed("held_out", 7, 1)) == "held_out"
    assert split_of(task_seed("train", 7, 1)) == "train"
    with pytest.raises(ConfigError, match="split"):
        task_seed("test", 0, 0)


def test_injected_latency_has_the_configured_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def record(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", record)
    weather = ToolWeather(config("lookup", latency_mean_seconds=0.2, latency_sigma=0.5), 1, latency=True)

    async def go() -> None:
        for _ in range(4000):
            await weather.call()

    asyncio.run(go())
    assert sum(slept) / len(slept) == pytest.approx(0.2, rel=0.05)
    assert len(set(slept)) > 3000


def test_faults_strike_with_the_configured_probability_and_repeat_by_seed() -> None:
    def strikes(seed: int) -> list[bool]:
        weather = ToolWeather(config("lookup", failure_probability=0.1), seed, latency=False)

        async def go() -> list[bool]:
            found = []
            for _ in range(1000):
                try:
                    await weather.call()
                    found.append(False)
                except EnvironmentFailure:
                    found.append(True)
            return found

        return asyncio.run(go())

    assert strikes(1) == strikes(1) != strikes(2)
    assert 60 < sum(strikes(1)) < 140

"""The base: turns, limits, counts, parallel calls, and the example of CONTRIBUTING as it stands there."""

import asyncio
import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.environments.support import config, play
from tunix_core.environment_config import EnvironmentOptions
from tunix_core.environments.rubric import Component, Episode, Rubric
from tunix_core.environments.tool_environment import ToolEnvironment
from tunix_core.errors import ConfigError, EnvironmentFailure


class Counting(ToolEnvironment[int]):
    """Count up to the task."""

    name = "counting"
    task_instructions = "Count."
    answer_pattern = re.compile(r"\d+")

    def draw(self, rng: random.Random) -> int:
        return rng.randrange(2, 10**6)

    def question(self, task: int) -> str:
        return f"to {task}"

    async def begin(self) -> None:
        self.count = 0
        self.seen: Episode | None = None

    def functions(self) -> Sequence[Callable[..., Any]]:
        return [self.add, self.break_it]

    async def add(self, number: int) -> int:
        """Adds."""
        self.count += number
        return self.count

    def break_it(self) -> None:
        raise EnvironmentFailure("broken")

    def rubric(self) -> Rubric:
        return Rubric(Component("right", self._right), Component("count", lambda _: self.count, 0.0))

    def _right(self, episode: Episode) -> float:
        self.seen = episode
        return float(episode.answer == str(self.count))


def counting(**fields: Any) -> Counting:
    return Counting(config("counting", options=EnvironmentOptions(), **fields))


ADD = '<tool_call>{"name": "add", "arguments": {"number": %s}}</tool_call>'


def test_an_episode_is_judged_as_a_whole() -> None:
    environment = counting(tool_format="hermes")
    _, results = play(environment, 4, [ADD % 2 + ADD % '"x"' + ADD % 3, "no number", "5"])
    assert results[0].text == (
        "<tool_response>\n2\n</tool_response>\n"
        '<tool_response>\nerror: number: received "x", accepted an integer\n</tool_response>\n'
        "<tool_response>\n5\n</tool_response>"
    )
    assert results[0].tool_calls == (("add", True), ("add", True))
    assert results[1].text.startswith("<tool_response>\nerror: neither a call")
    assert results[2].reward == 1.0
    assert results[2].components == {
        "right": 1.0,
        "count": 5.0,
        "malformed_calls": 2.0,
        "failed_calls": 0.0,
        "tool_calls": 2.0,
    }
    seen = environment.seen
    assert seen is not None
    assert (seen.task, seen.answer) == (environment.task(4), "5")
    assert [role for role, _ in seen.messages] == ["prompt", "policy", "tool", "policy", "tool", "policy"]
    assert [(call.name, call.arguments, call.text) for call in seen.calls] == [
        ("add", {"number": 2}, "2"),
        ("add", {"number": 3}, "5"),
    ]


def test_the_limit_of_turns_ends_and_scores_an_episode() -> None:
    environment = counting(max_turns=2)
    _, results = play(environment, 4, ["add 2", "add 3", "= 5"])
    assert [(result.done, result.truncated) for result in results] == [(False, False), (True, True)]
    assert results[1].components["count"] == 5
    assert results[1].reward == 0
    assert results[1].tool_calls == (("add", True),)
    assert environment.seen is not None
    assert environment.seen.answer is None
    _, results = play(environment, 4, ["add 2", "= 2"])
    assert (results[1].truncated, results[1].reward) == (False, 1.0)


def test_limits_of_calls_come_from_the_configuration() -> None:
    _, (result,) = play(counting(tool_format="hermes", max_calls_per_turn=2), 4, [ADD % 1 * 3])
    assert "error: 1 more calls were not made: at most 2 in a message" in result.text
    assert result.components["count"] == 0  # not judged yet
    assert result.components["malformed_calls"] == 1
    _, (result,) = play(counting(max_output_bytes=16), 4, ["add " + "9" * 40])
    assert result.text == "9" * 10 + " [cut]"


def test_an_episode_starts_anew() -> None:
    environment = counting()
    play(environment, 4, ["add 2", "nonsense", "= 2"])
    first, (result,) = play(environment, 4, ["= 0"])
    assert first.text == f"to {environment.task(4)}"
    assert result.components == {
        "right": 1.0,
        "count": 0.0,
        "malformed_calls": 0.0,
        "failed_calls": 0.0,
        "tool_calls": 0.0,
    }


def test_a_broken_environment_raises() -> None:
    with pytest.raises(EnvironmentFailure, match="broken"):
        play(counting(), 4, ["break_it"])
    with pytest.raises(EnvironmentFailure, match="step before reset"):
        asyncio.run(counting().step("add 1"))


def test_calls_of_a_message_wait_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their injected latencies overlap; and none of them changes what is drawn."""
    sleeping, most = 0, 0
    real = asyncio.sleep

    async def record(seconds: float) -> None:
        nonlocal sleeping, most
        assert seconds > 0
        sleeping += 1
        most = max(most, sleeping)
        await real(0)
        sleeping -= 1

    monkeypatch.setattr(asyncio, "sleep", record)
    play(counting(tool_format="hermes", latency_mean_seconds=0.2), 4, [ADD % 1 * 3, ADD % 1])
    assert most == 3


def test_a_fault_of_the_weather_costs_the_episode() -> None:
    with pytest.raises(EnvironmentFailure, match="injected fault"):
        play(counting(tool_format="hermes", failure_probability=1.0), 4, [ADD % 1 * 2])


def test_messages_without_calls_meet_no_weather() -> None:
    _, results = play(counting(failure_probability=1.0), 4, ["nonsense", "= 0"])
    assert results[-1].done


def test_plain_instructions_are_made_of_the_tools() -> None:
    assert "`add NUMBER`: Adds." in counting().opening(4).instructions
    assert not counting().opening(4).without_tools
    first, _ = play(counting(tool_format="llama3"), 4, [])
    assert first.instructions == "Count."
    assert first.without_tools.startswith("Count.\n\nYou may call functions")
    assert all(json.dumps(tool) in first.without_tools for tool in first.tools)
    assert [tool["function"]["name"] for tool in first.tools] == ["add", "break_it"]


def test_options_of_another_environment_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment\.options: received {}, accepted EnvironmentOptions"):
        Counting(config("counting"))


def test_the_example_of_the_guide_runs() -> None:
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    (source,) = re.findall(r"```python\n(.*?class Stock.*?)```", text, re.DOTALL)
    scope: dict[str, Any] = {"__name__": "stock"}
    exec(compile(source, "CONTRIBUTING.md", "exec"), scope)
    stock = scope["Stock"]
    for form in ("plain", "hermes"):
        environment = stock(config("stock", tool_format=form, options=stock.options_type()))
        for seed in (4, 5, 6):
            script = environment.demonstration(seed)
            _, results = play(environment, seed, [text for role, text in script if role == "policy"])
            assert [result.text for result in results[:-1]] == [text for _, text in script[2::2]]
            assert results[-1].reward == 1.0
            _, results = play(
                environment, seed, [environment._format.answer("no idea"), environment._format.answer("1")]
            )
            assert results[-1].reward == 0.0

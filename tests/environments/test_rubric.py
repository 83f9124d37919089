import asyncio
import math

import pytest

from tunix_core.environments.rubric import Component, Episode, Rubric, Score
from tunix_core.errors import ConfigError

EPISODE = Episode(task=3, messages=[("prompt", "p"), ("policy", "= 3")], calls=[], answer="3")


def score(*components: Component) -> Score:
    return asyncio.run(Rubric(*components).score(EPISODE))


async def later(episode: Episode) -> float:
    await asyncio.sleep(0)
    return len(episode.messages)


def test_the_reward_is_the_weighted_sum() -> None:
    found = score(
        Component("right", lambda episode: episode.answer == str(episode.task), 0.75),
        Component("length", later, -0.25),
        Component("watched", lambda _: 9, 0),
    )
    assert found.reward == 0.75 - 0.5
    assert found.components == {"right": 1.0, "length": 2.0, "watched": 9.0}
    assert all(type(value) is float for value in found.components.values())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_what_is_not_finite_counts_as_nothing_and_is_counted(value: float, weight: float) -> None:
    found = score(Component("broken", lambda _: value, weight), Component("right", lambda _: 1.0))
    assert found == Score(1.0, {"broken": 0.0, "right": 1.0, "nonfinite_components": 1.0})


def test_a_component_that_raises_is_no_reward_of_zero() -> None:
    with pytest.raises(ZeroDivisionError):
        score(Component("broken", lambda _: 1 / 0))


def test_an_episode_that_goes_on_has_the_names() -> None:
    assert Rubric(Component("right", lambda _: 1.0)).unscored() == {"right": 0.0}


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ([Component("Right", later)], "rubric component Right"),
        ([Component("tool_calls", later)], "rubric component tool_calls"),
        ([Component("a", later, math.nan)], "a finite weight"),
        ([Component("a", later), Component("a", later)], "each name once"),
    ],
)
def test_wrong_components_are_refused(components: list[Component], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rubric(*components)

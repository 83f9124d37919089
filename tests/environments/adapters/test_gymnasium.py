"""Codecs, and the environments that ship with Gymnasium."""

from __future__ import annotations

import asyncio
import collections
import json
import re
import sys

import numpy as np
import pytest

from tests.environments.adapters.support import made, play, play_all, say
from tunix_core import environment_config
from tunix_core.environment_config import GymnasiumOptions, Table
from tunix_core.environments import split_of, task_seed
from tunix_core.environments.adapters.codecs import (
    NotAnAction,
    action_codec,
    observation_as_json,
    rules,
    visible_colours,
)
from tunix_core.errors import ConfigError, EnvironmentFailure

gymnasium = pytest.importorskip("gymnasium", reason="the extra gymnasium is not installed")
spaces = gymnasium.spaces

SHIPPED = ("FrozenLake-v1", "CliffWalking-v1", "Taxi-v4", "Blackjack-v1")


class Words(gymnasium.Env):
    """Text in, text out: answers with the word reversed; ends at "end"."""

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = self.action_space = spaces.Text(max_length=9, min_length=1)
        self.closed = 0

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        del options
        return f"word{self.np_random.integers(1000)}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        return action[::-1], 0.25, action == "end", False, {}

    def close(self) -> None:
        type(self).num_closed += 1

    num_closed = 0


@pytest.fixture(scope="module", autouse=True)
def _registered():
    gymnasium.register("TunixWords-v0", entry_point=Words)
    yield
    del gymnasium.registry["TunixWords-v0"]


def test_text_spaces_stay_as_they_are_and_rewards_stay_with_their_message() -> None:
    before = Words.num_closed
    first, results = play_all(made("gymnasium", GymnasiumOptions(env_id="TunixWords-v0")), 3, "abc", "wörter", "end")
    assert re.fullmatch(r"word\d+", first.text)
    assert [result.reward for result in results] == [0.25, 0.0, 0.25]
    assert [result.text for result in results] == ["cba", "Not an action. Write a text of the action space.", ""]
    assert results[-1].components == {"return": 0.5, "actions": 2.0, "malformed_calls": 1.0}
    assert Words.num_closed > before + 1, "the one that was only checked, and the session's"


def test_the_splits_share_no_opening_where_that_is_asked_for() -> None:
    options = GymnasiumOptions(env_id="TunixWords-v0", splits="opening")

    async def opening(seed: int) -> str:
        environment = made("gymnasium", options)
        first = await environment.reset(seed)
        await environment.close()
        return first.text

    found: dict[str, set[str]] = {"train": set(), "held_out": set()}
    for split in found:
        for index in range(40):
            seed = task_seed(split, index, 0)
            assert split_of(seed) == split
            found[split].add(asyncio.run(opening(seed)))
    assert not found["train"] & found["held_out"]
    assert min(map(len, found.values())) > 10
    fixed = GymnasiumOptions(splits="opening")  # FrozenLake opens in one way only

    async def either() -> list[bool]:
        failed = []
        for split in found:
            environment = made("gymnasium", fixed)
            try:
                await environment.reset(task_seed(split, 0, 0))
                failed.append(False)
            except EnvironmentFailure:
                failed.append(True)
            await environment.close()
        return failed

    assert sorted(asyncio.run(either())) == [False, True]


@pytest.mark.parametrize("env_id", SHIPPED)
def test_shipped_environments_open_with_rules_and_named_actions(env_id: str) -> None:
    first, (result,) = play_all(made("gymnasium", GymnasiumOptions(env_id=env_id)), 5, "jump")
    assert "\x1b" not in first.text
    assert rules(env_id) in first.instructions
    assert first.instructions.endswith(("down.", "hit.", "dropoff.", "up.", "left."))
    assert result.components["malformed_calls"] == 1


def test_a_taxi_ride_solved_from_its_text_alone() -> None:
    """Colours tell where the taxi, the passenger and the destination are; a search over the text finds the way."""
    environment = made("gymnasium", GymnasiumOptions(env_id="Taxi-v4"))
    first, results = asyncio.run(play(environment, task_seed("train", 2, 0), lambda read: _taxi(read)))
    assert results[-1].reward == 20
    assert sum(result.reward for result in results) == results[-1].components["return"] > 0
    assert "{blue:" in first.text


def _taxi(read) -> str:
    """The next move, by breadth-first search on the grid that the text shows."""
    lines = read[-1].splitlines()[1:6]
    marks: dict[str, tuple[int, int]] = {}
    grid = []
    for row, line in enumerate(lines):
        plain = ""
        while line:
            found = re.match(r"\{([\w ]+):(.)\}", line)
            for colour in found[1].split() if found else ():
                marks[colour] = (row, len(plain) // 2)
            plain += found[2] if found else line[0]
            line = line[found.end() if found else 1 :]
        grid.append(plain)
    loaded = "green" in marks
    place = marks["green" if loaded else "yellow"]
    target = marks["magenta" if loaded else "blue"]
    if place == target:
        return "dropoff" if loaded else "pickup"
    ways = collections.deque([(place, "")])
    seen = {place}
    while ways:
        (row, column), first = ways.popleft()
        if (row, column) == target:
            return first
        for name, r, c, wall in (
            ("south", row + 1, column, ":"),
            ("north", row - 1, column, ":"),
            ("east", row, column + 1, grid[row][2 * column + 2]),
            ("west", row, column - 1, grid[row][2 * column]),
        ):
            if wall == ":" and 0 <= r < 5 and 0 <= c < 5 and (r, c) not in seen:
                seen.add((r, c))
                ways.append(((r, c), first or name))
    raise AssertionError("no way")


def test_a_time_limit_truncates_and_an_end_completes() -> None:
    limited = GymnasiumOptions(env_id="CliffWalking-v1", arguments=Table(max_episode_steps=3))
    _, results = play_all(made("gymnasium", limited), 1, "up", "up", "up")
    assert [(r.done, r.truncated) for r in results] == [(False, False), (False, False), (True, True)]
    way = GymnasiumOptions(env_id="CliffWalking-v1", arguments=Table(max_episode_steps=13))
    _, results = play_all(made("gymnasium", way), 1, "up", *["right"] * 11, "down")
    assert (results[-1].done, results[-1].truncated) == (True, False), "ended by itself in the last step allowed"
    assert results[-1].components["return"] == -13


def test_an_installed_package_registers_its_own(offer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module is imported when an id is asked for that Gymnasium does not have, and not before."""
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    monkeypatch.setattr(gymnasium, "registry", gymnasium.envs.registration.registry)
    folder = offer(environment_config.GYMNASIUM_ENTRY_POINTS, {"any": "offered_words"})
    entry_point = f"{Words.__module__}:Words"
    (folder / "offered_words.py").write_text(
        f"import gymnasium\ngymnasium.register('OfferedWords-v0', entry_point={entry_point!r})\n"
    )
    made("gymnasium", GymnasiumOptions())
    assert "offered_words" not in sys.modules
    first, _ = play_all(made("gymnasium", GymnasiumOptions(env_id="OfferedWords-v0")), 3, "end")
    assert first.text.startswith("word")
    del sys.modules["offered_words"]


def test_an_id_names_no_module() -> None:
    """Gymnasium would import it."""
    for env_id in ("antigravity:OfferedWords-v0", ""):
        with pytest.raises(ConfigError, match=r"an id without a module.*\n?.*tunix_airflow\.gymnasium_environments"):
            GymnasiumOptions(env_id=env_id)


@pytest.mark.parametrize("name", ["GymV21Environment", "GymV26Environment"])
def test_an_id_that_makes_whatever_its_argument_names_is_refused(name: str) -> None:
    """Gymnasium registers them; with shimmy installed they import and make any environment of the package gym."""
    assert f"{name}-v0" in gymnasium.registry
    for env_id in (name, f"{name}-v0"):
        with pytest.raises(ConfigError, match="no id that stands for environments of the package gym"):
            GymnasiumOptions(env_id=env_id, arguments=Table(env_id="antigravity:Any-v0"))


@pytest.mark.parametrize(
    ("extract", "message", "moved"),
    [
        ("tags", "Right it is. <action>down</action>", True),
        ("tags", "down", False),
        ("last_line", "I think\ndown", True),
        ("message", "I think\ndown", False),
        ("message", " DOWN ", True),
    ],
)
def test_where_in_the_message_the_action_stands(extract: str, message: str, moved: bool) -> None:
    _, (result,) = play_all(made("gymnasium", GymnasiumOptions(extract=extract)), 1, message)
    assert result.components["actions"] == float(moved)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (GymnasiumOptions(env_id="NoSuch-v1"), "NoSuch"),
        (GymnasiumOptions(arguments=Table(no_such=1)), "no_such"),
        (GymnasiumOptions(observation="text"), "environment.options.observation"),
        (GymnasiumOptions(env_id="Blackjack-v1", observation="ansi"), "no text rendering"),
        (GymnasiumOptions(action="text"), "names, number, json"),
        (GymnasiumOptions(action_names=("a", "b")), "4 names"),
        (GymnasiumOptions(env_id="TunixWords-v0", action="number"), "text, json"),
    ],
)
def test_what_does_not_fit_is_refused_when_it_is_made(options: GymnasiumOptions, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        made("gymnasium", options)


@pytest.mark.parametrize(
    ("space", "text", "action"),
    [
        (spaces.Discrete(3, start=5), "6", 6),
        (spaces.Discrete(3, start=5), "8", None),
        (spaces.Discrete(3), "1.5", None),
        (spaces.MultiDiscrete([2, 3]), "[1, 2]", [1, 2]),
        (spaces.MultiDiscrete([2, 3]), "[1, 3]", None),
        (spaces.MultiDiscrete([2, 3]), '{"a": 1}', None),
        (spaces.Box(-1, 1, (2,), np.float32), "[0.5, -1]", [0.5, -1.0]),
        (spaces.Box(-1, 1, (2,), np.float32), "[0.5, 2]", None),
        (spaces.Box(-1, 1, (2,), np.float32), "[[", None),
        (spaces.Tuple([spaces.Discrete(2), spaces.Text(3)]), '[1, "ab"]', (1, "ab")),
        (spaces.Tuple([spaces.Discrete(2), spaces.Text(3)]), "[1]", None),
        (spaces.Dict({"x": spaces.Discrete(2)}), '{"x": 1}', {"x": 1}),
        (spaces.Dict({"x": spaces.Discrete(2)}), '{"y": 1}', None),
        (spaces.Text(3), "abc", "abc"),
        (spaces.Text(3), "abcd", None),
    ],
)
def test_actions_from_text(space, text: str, action) -> None:
    decode, what = action_codec(GymnasiumOptions(env_id="Own-v0"), space)
    if action is None:
        with pytest.raises(NotAnAction, match=re.escape(what) if not isinstance(space, spaces.Text) else "text"):
            decode(text)
    else:
        found = decode(text)
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == action


def test_observations_as_json() -> None:
    value = {"grid": np.array([[1, 2]]), "pair": (np.int64(3), 0.5)}
    assert json.loads(observation_as_json(value)) == {"grid": [[1, 2]], "pair": [3, 0.5]}
    assert observation_as_json((1, 2), ("a", "b")) == '{"a": 1, "b": 2}'
    assert observation_as_json((1, 2), ("a",)) == "[1, 2]"


def test_colours_become_visible() -> None:
    """Nested ones, ones without an end and other control sequences among them."""
    assert (
        visible_colours("|\x1b[34;1mR\x1b[0m: |\x1b[43m \x1b[0m\x1b[K\x1b[1mB\x1b[m")
        == "|{blue:R}: |{yellow: }{marked:B}"
    )
    assert visible_colours("a\x1b[43m\x1b[34;1mR\x1b[0m\x1b[0mb") == "a{yellow blue:R}b"
    assert visible_colours("a\x1b[102mx") == "a{green:x}"
    assert visible_colours("plain") == "plain"


def test_an_end_is_an_end() -> None:
    options = GymnasiumOptions(arguments=Table(is_slippery=False))
    _, results = asyncio.run(play(made("gymnasium", options), 1, say("down", "right")))
    assert results[-1].done
    assert results[-1].reward == 0, "a hole"
    assert not results[-1].truncated

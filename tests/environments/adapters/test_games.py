"""`textarena` and `gem-llm`."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.environments.adapters.support import guesses, made, play, play_all, say
from tunix_core.environment_config import GemOptions, Table, TextArenaOptions
from tunix_core.environments import task_seed
from tunix_core.errors import ConfigError

HANOI = ("A C", "A B", "C B", "A C", "B A", "B C", "A C")


def test_gem_environments_that_fetch_or_ignore_seeds_are_refused() -> None:
    for env_id in ("rg:chain_sum", "math:GSM8K"):
        with pytest.raises(ConfigError, match="reasoning_gym"):
            GemOptions(env_id=env_id)


def test_textarena_tower_of_hanoi_to_the_end() -> None:
    pytest.importorskip("textarena", reason="the extra textarena is not installed")
    environment = made("textarena", TextArenaOptions(env_id="TowerOfHanoi-v0"))
    first, results = play_all(environment, 1, *(f"[{move}]" for move in HANOI))
    assert "Tower of Hanoi" in first.text
    assert [result.done for result in results] == [False] * 6 + [True]
    assert [result.reward for result in results] == [0.0] * 6 + [1.0]
    assert all("You are playing" not in result.text for result in results), "the opening is not repeated"
    assert all("[A C]" not in result.text for result in results[:1]), "nor the player's own move"


def test_textarena_counts_invalid_moves_and_ends_by_its_own_rule_or_ours() -> None:
    pytest.importorskip("textarena", reason="the extra textarena is not installed")
    _, results = play_all(made("textarena", TextArenaOptions(env_id="TowerOfHanoi-v0")), 1, "x", "x")
    assert [result.done for result in results] == [False, True]
    assert results[-1].components["malformed_calls"] == 2
    assert results[-1].reward <= 0
    patient = TextArenaOptions(env_id="TowerOfHanoi-v0", max_invalid_moves=5)
    _, results = play_all(made("textarena", patient), 1, *["x"] * 5, *(f"[{move}]" for move in HANOI))
    assert results[-1].done
    assert results[-1].reward == 1.0
    assert results[-1].components == {"return": 1.0, "actions": 12.0, "malformed_calls": 5.0}


def test_textarena_refuses_unknown_games_and_those_for_two() -> None:
    pytest.importorskip("textarena", reason="the extra textarena is not installed")
    with pytest.raises(ConfigError, match="NoSuch-v0"):
        made("textarena", TextArenaOptions(env_id="NoSuch-v0"))
    with pytest.raises((ConfigError, AssertionError)):
        play_all(made("textarena", TextArenaOptions(env_id="TicTacToe-v0")), 1)


@pytest.mark.parametrize(
    ("name", "options", "policy"),
    [
        ("textarena", TextArenaOptions(env_id="Mastermind-v0"), say(*["[1 2 3 4]"] * 50)),
        ("textarena", TextArenaOptions(env_id="Bandit-v0"), say(*["[red]"] * 50)),
        ("gem", GemOptions(env_id="game:Mastermind-v0-easy"), say(*[r"\boxed{1 2}"] * 50)),
        ("gem", GemOptions(env_id="game:GuessTheNumber-v0-random"), guesses(1, 100, r"\boxed{{{}}}")),
    ],
)
def test_games_that_draw_while_they_are_played_repeat_by_seed(name: str, options, policy) -> None:
    """Also when other sessions play at the same time, and when the process itself draws between the calls."""
    pytest.importorskip(name, reason=f"the extra {name} is not installed")
    seeds = [task_seed("train", index, 0) for index in range(8)]

    def drawing(read):
        random.random()
        return policy(read)

    async def together():
        return await asyncio.gather(*(play(made(name, options), seed, policy) for seed in seeds))

    one_by_one, disturbed = (
        [asyncio.run(play(made(name, options), seed, messages)) for seed in seeds] for messages in (policy, drawing)
    )
    assert disturbed == one_by_one
    assert asyncio.run(together()) == one_by_one
    assert len({str(results) for _, results in one_by_one}) > 1


def test_gem_says_what_its_limit_is() -> None:
    pytest.importorskip("gem", reason="the extra gem is not installed")
    options = GemOptions(env_id="game:TowerofHanoi-v0-easy", arguments=Table(max_turns=8))
    _, results = play_all(made("gem", options), 1, *(rf"\boxed{{{move}}}" for move in HANOI))
    assert (results[-1].reward, results[-1].done, results[-1].truncated) == (1.0, True, False)
    tight = GemOptions(env_id="game:TowerofHanoi-v0-easy", arguments=Table(max_turns=2))
    _, results = play_all(made("gem", tight), 1, *(rf"\boxed{{{move}}}" for move in HANOI[:2]))
    assert (results[-1].done, results[-1].truncated) == (True, True)
    assert "Enter your move" in results[0].text

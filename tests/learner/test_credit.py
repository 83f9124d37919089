"""Advantages as configured, from rows as they are delivered."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.data.support import make_rows, make_trajectory, with_two_turns
from tests.learner.support import make_config
from tunix_core.config import AlgorithmConfig
from tunix_core.config_loading import load_recipe
from tunix_core.data.buffer import ReplayBuffer
from tunix_core.data.packing import WindowSize
from tunix_core.learner.batches import assemble
from tunix_core.learner.credit import group_advantages, turn_rewards
from tunix_core.rl.advantages import group_relative_advantages, turn_returns

OVERLONG: dict[str, Any] = {"overlong_penalty": 0.5, "overlong_limit_tokens": 10, "overlong_buffer_tokens": 4}


def found(algorithm: AlgorithmConfig, lengths: list[int], rewards: list[float], episodes: list[str]) -> np.ndarray:
    """Of a group between other rows of its shard; each trajectory has a prompt of 4 tokens."""
    others = [make_trajectory(f"x/{i}", length=30) for i in range(2)]
    group = [
        make_trajectory(f"g/{i}", length=4 + length, reward=reward, episode_id=episode)
        for i, (length, reward, episode) in enumerate(zip(lengths, rewards, episodes, strict=True))
    ]
    return group_advantages(algorithm)(make_rows("s", [*others, *group]), np.arange(2, 2 + len(group)))


def test_the_penalty_for_length_is_in_the_reward() -> None:
    """6 tokens are free, 8 half the way, 10 and more cost the whole 0.5."""
    rewards = [1.0, 1.0, 1.0, 0.0]
    result = found(AlgorithmConfig(advantage="dr_grpo", **OVERLONG), [6, 8, 14, 10], rewards, list("abcd"))
    shaped = np.array([1.0, 0.75, 0.5, -0.5])
    np.testing.assert_allclose(result, shaped - shaped.mean(), atol=1e-6)
    plain = found(AlgorithmConfig(advantage="dr_grpo"), [6, 8, 14, 10], rewards, list("abcd"))
    np.testing.assert_allclose(plain, np.array(rewards) - 0.75, atol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp"])
def test_an_episode_has_one_length_however_it_forked(name: Any) -> None:
    """Episode a speaks 4 + 4 tokens in two trajectories; both carry the penalty of 8, and it counts once."""
    algorithm = AlgorithmConfig(advantage=name, **OVERLONG)
    forked = found(algorithm, [4, 4, 2, 10], [1.0, 1.0, 1.0, 0.0], list("aabc"))
    whole = found(algorithm, [8, 2, 10], [1.0, 1.0, 0.0], list("abc"))
    np.testing.assert_allclose(forked, whole[[0, 0, 1, 2]], atol=1e-6)


def test_equal_rewards_differ_by_length() -> None:
    result = found(AlgorithmConfig(advantage="grpo", **OVERLONG), [2, 8], [1.0, 1.0], list("ab"))
    wanted = group_relative_advantages(np.array([1.0, 0.75]), ["", ""], ["a", "b"], normalize=True)
    np.testing.assert_allclose(result, wanted)
    assert result[0] > 0 > result[1]


@pytest.mark.parametrize("penalty", [False, True])
def test_turns_of_a_group_through_the_batch(penalty: bool) -> None:
    """Each token has its turn's advantage, tool tokens none; the last turn also pays for the length."""
    group = [
        with_two_turns(make_trajectory("g/0", length=14), 0.5, 1.0),  # 9 policy tokens
        make_trajectory("g/1", length=9, reward=1.0),  # 5 policy tokens, paid nothing by turn
        with_two_turns(make_trajectory("g/2", length=11), -1.0, 2.0),  # 6 policy tokens
    ]
    options: dict[str, Any] = OVERLONG if penalty else {}
    config = dataclasses.replace(
        make_config(), algorithm=AlgorithmConfig(advantage="turn_level", discount=0.5, **options)
    )
    shard = "trajectories/date=2026-11-30/hour=00/actor_0-a0-00000000.parquet"
    rows = make_rows(shard, [make_trajectory("x/0", length=7), *group])
    buffer = ReplayBuffer(
        group_advantages=group_advantages(config.algorithm), window_tokens=32, max_staleness=1, buffer_bytes=2**20
    )
    assert buffer.add(rows) == {}
    (taken,) = buffer.take(1, 0, max_mean_staleness=9.0).groups or []
    last = 1.0 - (0.375 if penalty else 0.0)
    returns = np.array([0.5 + 0.5 * last, last, 0.0, -1.0 + 0.5 * 2.0, 2.0])
    wanted = (returns - returns.mean()) / (returns.std() + 1e-6)
    batch = assemble([taken], 0, [WindowSize(config.learner.window_tokens, (4,))], config)
    for i, turns in enumerate(([wanted[0], wanted[1]], [wanted[2]], [wanted[3], wanted[4]])):
        start = batch.layout.start[i]
        own = batch.arrays.advantages[batch.layout.window[i], start : start + group[i].num_tokens]
        spoken = [turn for turn in group[i].turns if turn.role == "policy"]
        for turn, advantage in zip(spoken, turns, strict=True):
            np.testing.assert_allclose(own[turn.start : turn.end], advantage, rtol=1e-5, atol=1e-6)
        assert not own[~group[i].loss_mask].any()


@pytest.mark.parametrize("name", ["turn_level", "gae"])
def test_turns_are_paid_what_the_episode_earned_after_a_fork(name: Any) -> None:
    """Whole or forked, delivered in any order: the returns of the turns are the same, and the length costs once."""
    algorithm = AlgorithmConfig(advantage=name, discount=0.5, **OVERLONG)
    first = with_two_turns(make_trajectory("g/0", length=14, episode_id="a"), 0.5, 1.0)  # 9 policy tokens
    second = with_two_turns(make_trajectory("g/1", length=11, episode_id="a", fork_index=1), -1.0, 2.0)  # and 6
    other = with_two_turns(make_trajectory("g/2", length=11, episode_id="b"), 0.0, 1.0)
    for group in ([first, second, other], [other, second, first]):
        rows = make_rows("s", group)
        turns, rewards = turn_rewards(algorithm, rows, np.arange(3))
        returns = {
            (rows.episode_ids[row], int(rows.forks[row])): turn_returns(rewards[turns.row == row], 0.5).tolist()
            for row in range(3)
        }
        expected = turn_returns([0.5, 1.0, -1.0, 2.0 - 0.5], 0.5)
        np.testing.assert_allclose([*returns["a", 0], *returns["a", 1]], expected, atol=1e-6)
        np.testing.assert_allclose(returns["b", 0], [0.5, 1.0], atol=1e-6)


def test_a_limit_that_only_the_longest_episode_reaches_is_accepted() -> None:
    options = {f"algorithm.{name}": value for name, value in OVERLONG.items()}
    options |= {"actor.max_turns": 2, "actor.max_turn_tokens": 7, "algorithm.overlong_limit_tokens": 17}
    assert load_recipe("lookup", options).max_policy_tokens == 14

"""Advantages as configured, from rows as they are delivered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.data.support import make_rows, make_trajectory
from tunix_core.config import AlgorithmConfig, load_recipe
from tunix_core.learner.credit import group_advantages
from tunix_core.rl.advantages import group_relative_advantages

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


def test_a_limit_that_only_the_longest_episode_reaches_is_accepted() -> None:
    options = {f"algorithm.{name}": value for name, value in OVERLONG.items()}
    options |= {"actor.max_turns": 2, "actor.max_turn_tokens": 7, "algorithm.overlong_limit_tokens": 17}
    assert load_recipe("lookup", options).max_policy_tokens == 14

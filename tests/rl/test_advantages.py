"""Advantages against siblings and against the batch."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunix_core.rl.advantages import (
    batch_normalized,
    group_relative_advantages,
    leave_one_out_advantages,
    soft_overlong_penalty,
    turn_level_advantages,
    turn_returns,
)


def loop(rewards, groups, episodes, *, normalize, epsilon=1e-6) -> list[float]:
    """The definition, one trajectory at a time, in Python floats."""
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        returns = {}
        for r, g, e in zip(rewards, groups, episodes, strict=True):
            if g == group:
                returns.setdefault(e, r)
        values = list(returns.values())
        if len(values) < 2 or min(values) == max(values):
            out.append(0.0)
            continue
        mean = sum(values) / len(values)
        deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
        out.append((reward - mean) / ((deviation + epsilon) if normalize else 1.0))
    return out


def test_golden_values() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0]
    ids = (["g"] * 4, list("abcd"))
    for normalize, scale in ((False, 1.0), (True, 1 / (0.5 + 1e-6))):
        result = group_relative_advantages(rewards, *ids, normalize=normalize)
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, np.array([0.5, -0.5, -0.5, 0.5]) * scale, rtol=1e-6)


def test_a_fork_counts_once() -> None:
    """Episode a forked into three trajectories: the mean is 1/2, not 3/4."""
    result = group_relative_advantages(np.array([1.0, 1, 1, 0]), ["g"] * 4, ["a", "a", "a", "b"], normalize=False)
    np.testing.assert_array_equal(result, [0.5, 0.5, 0.5, -0.5])


def test_the_same_episode_name_in_two_groups_is_two_episodes() -> None:
    result = group_relative_advantages(
        np.array([1.0, 0.0, 3.0, 5.0]), ["g", "g", "h", "h"], ["0", "1", "0", "1"], normalize=False
    )
    np.testing.assert_array_equal(result, [0.5, -0.5, -1.0, 1.0])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("rewards", [[], [3.0], [0.1, 0.1, 0.1], [1 / 3] * 7, [1e9] * 3])
def test_no_signal_is_exactly_zero(rewards: list[float], normalize: bool) -> None:
    ids = [str(i) for i in range(len(rewards))]
    result = group_relative_advantages(np.array(rewards), ["g"] * len(rewards), ids, normalize=normalize)
    np.testing.assert_array_equal(result, np.zeros(len(rewards), np.float32))


def test_one_episode_alone_has_no_baseline_whatever_its_forks() -> None:
    result = group_relative_advantages(np.array([1.0, 1.0]), ["g", "g"], ["a", "a"], normalize=False)
    np.testing.assert_array_equal(result, [0.0, 0.0])


@st.composite
def deliveries(draw: st.DrawFn) -> list[tuple[float, str, str]]:
    rows = []
    for group in range(draw(st.integers(1, 4))):
        for episode in range(draw(st.integers(1, 4))):
            reward = draw(st.sampled_from([0.0, 0.25, 1.0, -2.0]))
            rows += [(reward, f"g{group}", f"e{episode}")] * draw(st.integers(1, 3))
    return draw(st.permutations(rows))


@given(deliveries(), st.booleans())
def test_by_id_in_any_order_as_the_loop_says(rows: list[tuple[float, str, str]], normalize: bool) -> None:
    rewards, groups, episodes = (list(column) for column in zip(*rows, strict=True))
    result = group_relative_advantages(np.array(rewards), groups, episodes, normalize=normalize)
    np.testing.assert_allclose(result, loop(rewards, groups, episodes, normalize=normalize), rtol=1e-6, atol=1e-7)
    # Over episodes, not trajectories, a group's advantages add up to nothing.
    for group in set(groups):
        of_episode = {e: a for a, g, e in zip(result.tolist(), groups, episodes, strict=True) if g == group}
        assert abs(sum(of_episode.values())) < 1e-5


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    result = leave_one_out_advantages(np.array([1.0, 0.0, 0.5, 7.0]), ["g", "g", "g", "h"], ["a", "b", "c", "a"])
    np.testing.assert_allclose(result, [1 - 0.25, 0 - 0.75, 0.5 - 0.5, 0.0], atol=1e-7)


@given(deliveries())
def test_leave_one_out_as_the_loop_says(rows: list[tuple[float, str, str]]) -> None:
    rewards, groups, episodes = (list(column) for column in zip(*rows, strict=True))
    expected = []
    for reward, group, episode in rows:
        others = {e: r for r, g, e in rows if g == group and e != episode}
        expected.append(reward - sum(others.values()) / len(others) if others else 0.0)
    result = leave_one_out_advantages(np.array(rewards), groups, episodes)
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


def test_batch_normalized_counts_an_episode_once() -> None:
    """Episodes 1 (three trajectories), 0 and -1: mean 0, deviation sqrt(2/3)."""
    result = batch_normalized(np.array([1.0, 1, 1, 0, -1]), ["g", "g", "g", "g", "h"], ["a", "a", "a", "b", "a"])
    np.testing.assert_allclose(result, np.array([1, 1, 1, 0, -1]) / math.sqrt(2 / 3), rtol=1e-5, atol=1e-7)
    for flat in ([], [2.0], [0.3] * 4):
        ids = [str(i) for i in range(len(flat))]
        np.testing.assert_array_equal(batch_normalized(np.array(flat), ["g"] * len(flat), ids), np.zeros(len(flat)))


def test_turn_returns_are_what_comes_after() -> None:
    np.testing.assert_array_equal(turn_returns([1.0, 0.0, 4.0], discount=0.5), [2.0, 2.0, 4.0])
    np.testing.assert_array_equal(turn_returns([]), [])


def test_turn_level_golden() -> None:
    """Returns 2, 1 and 0: mean 1, deviation sqrt(2/3)."""
    first, second = turn_level_advantages([np.array([1.5, 1.0]), np.array([0.0])], discount=0.5)
    assert first.dtype == np.float32
    np.testing.assert_allclose(first, np.array([1, 0]) / math.sqrt(2 / 3), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(second, [-1 / math.sqrt(2 / 3)], rtol=1e-5)


@given(st.lists(st.lists(st.integers(-2, 2), min_size=1, max_size=4), min_size=1, max_size=5), st.floats(0, 1))
def test_turn_level_as_the_loop_says(rewards: list[list[int]], discount: float) -> None:
    returns = [
        [sum(discount ** (j - k) * own[j] for j in range(k, len(own))) for k in range(len(own))] for own in rewards
    ]
    every = [value for own in returns for value in own]
    mean = sum(every) / len(every)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in every) / len(every))
    found = turn_level_advantages([np.array(own, float) for own in rewards], discount=discount)
    for own, result in zip(returns, found, strict=True):
        expected = [(value - mean) / (deviation + 1e-6) if min(every) < max(every) else 0.0 for value in own]
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def test_paid_at_the_end_of_equally_many_turns_it_is_grpo() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 0.25])
    whole = group_relative_advantages(rewards, ["g"] * 5, list("abcde"), normalize=True)
    by_turn = turn_level_advantages([np.array([0.0, 0.0, reward]) for reward in rewards])
    for advantage, turns in zip(whole, by_turn, strict=True):
        np.testing.assert_allclose(turns, [advantage] * 3, rtol=1e-6)


def test_without_a_difference_a_turn_has_no_signal() -> None:
    assert turn_level_advantages([]) == []
    assert [own.tolist() for own in turn_level_advantages([np.array([0.0, 0.3]), np.zeros(0), np.array([0.3])])] == [
        [0.0, 0.0],
        [],
        [0.0],
    ]


def test_the_overlong_penalty_is_a_slope() -> None:
    tokens = np.array([0, 80, 85, 90, 100, 1000])
    np.testing.assert_allclose(soft_overlong_penalty(tokens, 100, 20), [0, 0, -0.25, -0.5, -1, -1])

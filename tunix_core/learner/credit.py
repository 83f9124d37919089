"""From rewards to advantages, as the run's algorithm says: of a group when it closes, and against the batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from tunix_core.config import AlgorithmConfig
from tunix_core.data.buffer import GroupAdvantages
from tunix_core.data.groups import Group
from tunix_core.data.rows import Rows
from tunix_core.data.turns import PolicyTurns, at_ends, spread
from tunix_core.rl.advantages import (
    group_relative_advantages,
    leave_one_out_advantages,
    mean_and_deviation,
    normalized,
    of_episodes,
    soft_overlong_penalty,
    turn_level_advantages,
    turn_returns,
)


def group_advantages(algorithm: AlgorithmConfig) -> GroupAdvantages:
    """The advantages of one group's trajectories, or of their turns."""
    if algorithm.advantage == "turn_level":
        return functools.partial(_turn_advantages, algorithm)
    if algorithm.has_value_head:
        return _no_advantages

    def advantages(rows: Rows, members: np.ndarray) -> np.ndarray:
        episode_ids = [rows.episode_ids[i] for i in members]
        rewards = rows.rewards[members] + overlong_penalties(algorithm, rows, members)
        one_group = [""] * len(rewards)
        if algorithm.advantage == "rloo":
            return leave_one_out_advantages(rewards, one_group, episode_ids)
        normalize = algorithm.advantage == "grpo"
        return group_relative_advantages(rewards, one_group, episode_ids, normalize=normalize)

    return advantages


def _no_advantages(rows: Rows, members: np.ndarray) -> np.ndarray:
    """float32 [N]; the device estimates them, token by token, once there is a batch."""
    del rows
    return np.zeros(len(members), np.float32)


def _turn_advantages(algorithm: AlgorithmConfig, rows: Rows, members: np.ndarray) -> np.ndarray:
    """float32 [N, most turns]"""
    turns, rewards = turn_rewards(algorithm, rows, members)
    own = np.split(rewards, turns.offsets[1:-1])
    found = np.zeros((len(members), max(1, int(np.diff(turns.offsets).max(initial=0)))), np.float32)
    found[turns.row, turns.number] = np.concatenate(turn_level_advantages(own, discount=algorithm.discount))
    return found


def turn_rewards(algorithm: AlgorithmConfig, rows: Rows, members: np.ndarray) -> tuple[PolicyTurns, np.ndarray]:
    """The policy turns of whole episodes, and float32 [K] what each is paid: the last one also for the length.

    The last turn before a fork is also paid what the episode still earned after it, discounted by one turn: so returns are
    those of the whole episode, and nothing that a trajectory was good for is lost with the next one.
    """
    assert rows.turns is not None, "AlgorithmConfig.reads_turns says what is read"
    turns = rows.turns.take(members)
    rewards = turns.rewards.copy()
    penalties = overlong_penalties(algorithm, rows, members)
    later: dict[str, float] = {}
    for place in np.argsort(-rows.forks[members], kind="stable").tolist():
        episode, own = rows.episode_ids[members[place]], slice(turns.offsets[place], turns.offsets[place + 1])
        if own.start < own.stop:
            after = algorithm.discount * later[episode] if episode in later else penalties[place]
            rewards[own.stop - 1] += after
            later[episode] = turn_returns(rewards[own], algorithm.discount)[0]
    return turns, rewards


def overlong_penalties(algorithm: AlgorithmConfig, rows: Rows, members: np.ndarray) -> np.ndarray:
    """float32 [N], 0 or below: what an episode's length adds to the reward of each of its trajectories.

    Args:
        members: [N] positions of whole episodes.
    """
    if not algorithm.overlong_penalty:
        return np.zeros(len(members), np.float32)
    episodes, own = np.unique([rows.episode_ids[i] for i in members], return_inverse=True)
    of_rows = [rows.loss_mask[rows.offsets[i] : rows.offsets[i + 1]].sum() for i in members]
    num_tokens = np.bincount(own, of_rows, minlength=len(episodes))
    slope = soft_overlong_penalty(num_tokens, algorithm.overlong_limit_tokens, algorithm.overlong_buffer_tokens)
    return (np.float32(algorithm.overlong_penalty) * slope)[own]


def batch_advantages(
    groups: Sequence[Group], algorithm: AlgorithmConfig, statistics: tuple[float, float] | None = None
) -> np.ndarray:
    """float32 [trajectories] or [tokens]: those of the groups, against the batch where the algorithm says so.

    Args:
        statistics: of the whole batch, see `rl.advantages.normalized`; None: the groups are all of it.
    """
    if algorithm.advantage == "turn_level":
        return np.concatenate([_of_tokens(group) for group in groups])
    advantages = np.concatenate([g.advantages for g in groups])
    if algorithm.advantage != "reinforce_pp":
        return advantages
    return normalized(advantages, statistics or mean_and_deviation(episode_advantages(groups)))


def episode_advantages(groups: Sequence[Group]) -> np.ndarray:
    """float64 [episodes], one of each."""
    return np.concatenate(
        [np.zeros(0), *(of_episodes(g.advantages, [""] * len(g.advantages), g.rows.episode_ids) for g in groups)]
    )


def token_rewards(groups: Sequence[Group], algorithm: AlgorithmConfig) -> np.ndarray | None:
    """float32 [tokens], what each turn is paid at its last policy token; None without a value head."""
    if not algorithm.has_value_head:
        return None

    def of_group(rows: Rows) -> np.ndarray:
        return at_ends(*turn_rewards(algorithm, rows, np.arange(len(rows.index))), rows.loss_mask, rows.offsets)

    return np.concatenate([of_group(group.rows) for group in groups])


def _of_tokens(group: Group) -> np.ndarray:
    """float32 [tokens of the group]: a turn's advantage at each of its tokens."""
    turns = group.rows.turns
    assert turns is not None, "AlgorithmConfig.reads_turns says what is read"
    return spread(turns, group.advantages[turns.row, turns.number], group.rows.offsets)

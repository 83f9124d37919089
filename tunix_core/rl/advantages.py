"""Advantages of whole episodes against their siblings on the same task, and against the batch.

Members of a group are found by id, never by position. An episode that forked into several
trajectories counts once in every mean and deviation, and its trajectories share what it gets.

Shapes: N trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def group_relative_advantages(
    rewards: np.ndarray,
    group_ids: Sequence[str],
    episode_ids: Sequence[str],
    *,
    normalize: bool,
    epsilon: float = 1e-6,
) -> np.ndarray:
    """A = (R - mean(group)) / (std(group) + epsilon).

    GRPO (arXiv:2402.03300, section 4.1.2); without the division it is Dr.GRPO's (arXiv:2503.20783). A group
    with fewer than two episodes, or whose rewards are all equal, has no signal: exactly 0.

    Args:
        rewards: [N], one per trajectory; trajectories of one episode share theirs.
        group_ids, episode_ids: [N].

    Returns:
        float32 [N].
    """

    def advantage(own: np.ndarray, returns: np.ndarray) -> np.ndarray:
        return (own - returns.mean()) / (returns.std() + epsilon if normalize else 1.0)

    return _by_group(rewards, group_ids, episode_ids, advantage)


def leave_one_out_advantages(rewards: np.ndarray, group_ids: Sequence[str], episode_ids: Sequence[str]) -> np.ndarray:
    """A = R - mean of the group's *other* episodes (RLOO, arXiv:2402.14740, eq. 5).

    With n episodes that is n / (n - 1) (R - mean(group)): an unbiased baseline. Arguments, result and
    groups without a signal as `group_relative_advantages`.
    """

    def advantage(own: np.ndarray, returns: np.ndarray) -> np.ndarray:
        return (own - returns.mean()) * len(returns) / (len(returns) - 1)

    return _by_group(rewards, group_ids, episode_ids, advantage)


def batch_normalized(
    advantages: np.ndarray, group_ids: Sequence[str], episode_ids: Sequence[str], epsilon: float = 1e-6
) -> np.ndarray:
    """(A - mean) / (std + epsilon) over the episodes of a batch.

    REINFORCE++ normalises returns over the batch and not over a group; with centred returns in, it is the
    paper's variant with a group baseline (arXiv:2501.03262, section 3).

    Args:
        advantages: [N], of whole trajectories.
        group_ids, episode_ids: [N].

    Returns:
        float32 [N]; zeros where all are equal.
    """
    return normalized(advantages, mean_and_deviation(of_episodes(advantages, group_ids, episode_ids)), epsilon)


def of_episodes(advantages: np.ndarray, group_ids: Sequence[str], episode_ids: Sequence[str]) -> np.ndarray:
    """float64 [episodes], in order: what each of them got. Arguments as `batch_normalized`."""
    return np.asarray(advantages, np.float64)[_first_of_episode(_numbered(group_ids), episode_ids)]


def mean_and_deviation(values: np.ndarray) -> tuple[float, float]:
    """Of a batch's episodes, [episodes]; the deviation is 0 only where all are equal."""
    if not len(values) or np.ptp(values) == 0:
        return 0.0, 0.0
    return float(values.mean()), float(values.std())


def normalized(advantages: np.ndarray, statistics: tuple[float, float], epsilon: float = 1e-6) -> np.ndarray:
    """(A - mean) / (std + epsilon), float32 [N] of any part of a batch; zeros where std is 0.

    Args:
        statistics: mean and std, of the whole batch.
    """
    mean, deviation = statistics
    if deviation == 0:
        return np.zeros(len(advantages), np.float32)
    return ((np.asarray(advantages, np.float64) - mean) / (deviation + epsilon)).astype(np.float32)


def turn_returns(turn_rewards: Sequence[float] | np.ndarray, discount: float = 1.0) -> np.ndarray:
    """G_k = sum over j >= k of discount^(j - k) r_j: what came after each policy turn of one trajectory.

    Args:
        turn_rewards: [K], in order.
        discount: per turn.

    Returns:
        float64 [K].
    """
    returns = np.zeros(len(turn_rewards))
    later = 0.0
    for k in range(len(turn_rewards) - 1, -1, -1):
        later = returns[k] = turn_rewards[k] + discount * later
    return returns


def turn_level_advantages(
    turn_rewards: Sequence[np.ndarray], *, discount: float = 1.0, epsilon: float = 1e-6
) -> list[np.ndarray]:
    """A_ik = (G_ik - mean) / (std + epsilon), G_ik the return from turn k on, over all turns of a group.

    As GRPO's process supervision (arXiv:2402.03300, section 4.1.3), which pays what comes after a step, with one
    departure: returns are centred, not rewards. Centred rewards would charge for every further turn, or pay for it.

    Args:
        turn_rewards: of each trajectory of one group, `[turns]`.
        discount: per turn.

    Returns:
        float32 `[turns]` of each; zeros where all returns are equal.
    """
    returns = [turn_returns(rewards, discount) for rewards in turn_rewards]
    every = np.concatenate([np.zeros(0), *returns])
    if not len(every) or np.ptp(every) == 0:
        return [np.zeros(len(own), np.float32) for own in returns]
    return [((own - every.mean()) / (every.std() + epsilon)).astype(np.float32) for own in returns]


def soft_overlong_penalty(num_tokens: np.ndarray, limit_tokens: int, buffer_tokens: int) -> np.ndarray:
    """0 up to limit - buffer, then falling linearly to -1 at the limit, -1 beyond (DAPO, arXiv:2503.14476, eq. 13).

    Args:
        num_tokens: [N], policy tokens per episode.
        limit_tokens: the longest that is allowed.
        buffer_tokens: length of the slope, 1 to `limit_tokens`.

    Returns:
        float32 [N], added to the rewards.
    """
    over = np.asarray(num_tokens, np.float64) - (limit_tokens - buffer_tokens)
    return -np.clip(over / buffer_tokens, 0, 1).astype(np.float32)


def _by_group(
    rewards: np.ndarray,
    group_ids: Sequence[str],
    episode_ids: Sequence[str],
    advantage: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> np.ndarray:
    """`advantage(rewards of a group's trajectories, returns of its episodes)`, in the trajectories' order."""
    rewards = np.asarray(rewards, np.float64)
    groups = _numbered(group_ids)
    first_of_episode = _first_of_episode(groups, episode_ids)
    advantages = np.zeros(len(rewards))
    for group in range(groups.max() + 1 if len(groups) else 0):
        members = groups == group
        returns = rewards[members & first_of_episode]
        if len(returns) >= 2 and np.ptp(returns) > 0:
            advantages[members] = advantage(rewards[members], returns)
    return advantages.astype(np.float32)


def _numbered(names: Sequence[str]) -> np.ndarray:
    """Equal names -> equal numbers from 0."""
    return np.unique(np.asarray(names, str), return_inverse=True)[1]


def _first_of_episode(groups: np.ndarray, episode_ids: Sequence[str]) -> np.ndarray:
    """bool [N]: one trajectory of each (group, episode)."""
    pairs = np.stack([groups, _numbered(episode_ids)], axis=1)
    first = np.zeros(len(groups), bool)
    first[np.unique(pairs, axis=0, return_index=True)[1]] = True
    return first

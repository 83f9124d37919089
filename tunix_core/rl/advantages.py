"""Group-relative advantages: how much better an episode was than its siblings on the same task."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def group_relative_advantages(
    rewards: np.ndarray,
    group_ids: Sequence[str],
    episode_ids: Sequence[str],
    *,
    normalize: bool,
    epsilon: float = 1e-6,
) -> np.ndarray:
    """A = (R - mean(group)) / (std(group) + epsilon), members found by id and never by position.

    GRPO (arXiv:2402.03300, section 4.1.2); without the division it is Dr.GRPO's (arXiv:2503.20783).
    An episode that forked into several trajectories counts once in mean and deviation. A group with
    fewer than two episodes, or whose rewards are all equal, has no signal: exactly 0.

    Args:
        rewards: [N], one per trajectory; trajectories of one episode share theirs.
        group_ids, episode_ids: [N].

    Returns:
        float32 [N].
    """
    rewards = np.asarray(rewards, np.float64)
    groups = np.unique(np.asarray(group_ids, str), return_inverse=True)[1]
    first_of_episode = np.zeros(len(rewards), bool)
    pairs = np.stack([groups, np.unique(np.asarray(episode_ids, str), return_inverse=True)[1]], axis=1)
    first_of_episode[np.unique(pairs, axis=0, return_index=True)[1]] = True
    advantages = np.zeros(len(rewards))
    for group in range(groups.max() + 1 if len(groups) else 0):
        members = groups == group
        returns = rewards[members & first_of_episode]
        if len(returns) < 2 or np.ptp(returns) == 0:
            continue
        scale = returns.std() + epsilon if normalize else 1.0
        advantages[members] = (rewards[members] - returns.mean()) / scale
    return advantages.astype(np.float32)

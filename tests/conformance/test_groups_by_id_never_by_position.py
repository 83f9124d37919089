"""Groups inferred from stride mis-paired members (AReaL #1419, tunix #816)."""

import numpy as np
import pytest

from tests.data.support import make_rows, make_trajectory
from tunix_core.config import AlgorithmConfig
from tunix_core.learner.credit import group_advantages
from tunix_core.rl.advantages import batch_normalized, group_relative_advantages, leave_one_out_advantages

# group, episode, reward: complete; one member lost; one episode of two forks.
DELIVERED = [
    *(("g0", f"e{i}", float(i % 2)) for i in range(4)),
    *(("g1", f"e{i}", float(i == 0)) for i in range(3)),
    ("g2", "e0", 1.0),
    ("g2", "e0", 1.0),
    ("g2", "e1", 0.0),
]

FUNCTIONS = {
    "grpo": lambda *columns: group_relative_advantages(*columns, normalize=True),
    "dr_grpo": lambda *columns: group_relative_advantages(*columns, normalize=False),
    "rloo": leave_one_out_advantages,
    "reinforce_pp": lambda rewards, groups, episodes: batch_normalized(
        group_relative_advantages(rewards, groups, episodes, normalize=False), groups, episodes
    ),
}


def by_member(name: str, rows: list[tuple[str, str, float]]) -> dict[tuple[str, str], float]:
    groups, episodes, rewards = (list(column) for column in zip(*rows, strict=True))
    values = FUNCTIONS[name](np.array(rewards), groups, episodes)
    found: dict[tuple[str, str], float] = {}
    for key, value in zip(zip(groups, episodes, strict=True), values.tolist(), strict=True):
        assert found.setdefault(key, value) == value, "forks of an episode share its advantage"
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_groups_by_id_never_by_position(name: str) -> None:
    """Any order gives each member the same."""
    expected = by_member(name, DELIVERED)
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(len(DELIVERED))
        assert by_member(name, [DELIVERED[i] for i in order]) == pytest.approx(expected, abs=1e-7)


def test_an_incomplete_group_is_that_of_its_delivered_members_and_a_fork_counts_once() -> None:
    found = by_member("dr_grpo", DELIVERED)
    assert found["g1", "e0"] == pytest.approx(2 / 3)
    assert found["g1", "e2"] == pytest.approx(-1 / 3)
    assert found["g2", "e0"] == pytest.approx(1 / 2)  # counted twice it would be 1/3
    assert by_member("rloo", DELIVERED)["g2", "e1"] == pytest.approx(-1.0)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_the_learner_uses_the_function_that_the_configuration_names(name: str) -> None:
    rows = [row for row in DELIVERED if row[0] == "g1"]
    rewards, episodes = np.array([row[2] for row in rows]), [row[1] for row in rows]
    delivered = [
        make_trajectory(f"g1/{i}", episode_id=episode, reward=float(reward))
        for i, (episode, reward) in enumerate(zip(episodes, rewards, strict=True))
    ]
    found = group_advantages(AlgorithmConfig(advantage=name))(make_rows("s", delivered), np.arange(len(rows)))
    np.testing.assert_allclose(found, FUNCTIONS[name](rewards, ["g1"] * 3, episodes))

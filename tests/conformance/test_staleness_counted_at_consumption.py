"""Lag off by one; time in the queue not counted (prime-rl #1902, #3313)."""

import math

import pytest

from tests.data.support import make_group, make_rows, make_trajectory
from tests.data.test_buffer import make_buffer
from tunix_core.data.groups import trajectory_staleness


@pytest.mark.parametrize(
    ("version", "read_at", "consumed_at", "staleness"),
    [(0, 0, 0, 0), (0, 0, 1, 1), (3, 3, 5, 2), (3, 5, 5, 2), (3, 3, 6, None), (2, 5, 5, None)],
)
def test_staleness_counted_at_consumption(version: int, read_at: int, consumed_at: int, staleness: int | None) -> None:
    """Bound 2. `None`: over the bound, whether it got there in flight or in the queue."""
    buffer = make_buffer(max_staleness=2)
    buffer.advance(read_at)
    buffer.add(make_rows("s", make_group("g", version=version)))
    arrives_over_the_bound = read_at - version > 2  # then it takes no room in the buffer either
    assert buffer.ledger.trajectories()["stale"] == (2 if arrives_over_the_bound else 0)
    buffer.advance(consumed_at)
    groups = buffer.take(1, consumed_at, max_mean_staleness=math.inf).groups
    if staleness is None:
        assert groups is None
        assert buffer.ledger.trajectories()["stale"] == 2
    else:
        assert trajectory_staleness(groups[0].rows.version_min, consumed_at).tolist() == [staleness] * 2


def test_the_oldest_token_counts_and_the_group_goes_as_a_whole() -> None:
    buffer = make_buffer(max_staleness=2)
    buffer.advance(5)
    swapped = make_trajectory("g/1", version=5)
    swapped.token_policy_version[4] = 3  # one token by older weights
    buffer.add(make_rows("s", [make_trajectory("g/0", version=5, reward=1.0), swapped]))
    groups = buffer.take(1, 5, max_mean_staleness=math.inf).groups
    assert trajectory_staleness(groups[0].rows.version_min, 5).tolist() == [0, 2]
    buffer.put_back(groups)
    assert buffer.take(1, 6, max_mean_staleness=math.inf).groups is None
    assert buffer.ledger.trajectories()["stale"] == 2

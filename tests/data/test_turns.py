"""What each turn of the policy was paid, in columns."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.data.support import make_trajectory, with_two_turns
from tunix_core.data import turns
from tunix_core.data.rows import from_shard, from_trajectories
from tunix_core.storage.shards import decode, encode
from tunix_core.types import Trajectory, Turn


def trajectories() -> list[Trajectory]:
    """Two turns, one turn, two turns; between the two a tool's answer."""
    return [
        with_two_turns(make_trajectory("g/0", length=14, group_size=3), 0.5, 1.0),
        make_trajectory("g/1", length=9, group_size=3),
        with_two_turns(make_trajectory("g/2", length=12, group_size=3), -1.0, 2.0),
    ]


def test_columns_of_a_shard_are_the_turns_of_its_rows() -> None:
    rows = decode(encode(trajectories()))
    found, slow = turns.of_shard(rows), turns.of_trajectories(trajectories())
    for fast, one_by_one in zip(found, slow, strict=True):
        assert fast.dtype == one_by_one.dtype
        np.testing.assert_array_equal(fast, one_by_one)
    assert found.offsets.tolist() == [0, 2, 3, 5]
    assert found.rewards.tolist() == [0.5, 1.0, 0.0, -1.0, 2.0]
    assert (found.row.tolist(), found.number.tolist()) == ([0, 0, 1, 2, 2], [0, 1, 0, 0, 1])
    some = found.take(np.array([2, 0]))
    assert some.offsets.tolist() == [0, 2, 4]
    assert some.rewards.tolist() == [-1.0, 2.0, 0.5, 1.0]


def test_they_are_read_only_where_asked_for() -> None:
    rows = decode(encode(trajectories()))
    plain = from_shard("s", rows, incarnation="a0")
    asked = from_shard("s", rows, incarnation="a0", with_turns=True)
    assert plain.turns is None
    assert plain.take(np.array([0])).turns is None
    assert asked.faults == {}
    taken = asked.take(np.array([1, 2]))
    assert taken.turns is not None
    assert taken.turns.rewards.tolist() == [0.0, -1.0, 2.0]
    assert asked.num_bytes - plain.num_bytes == turns.of_shard(rows).num_bytes > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda own: own[:-1], "do not cover"),  # the last turn's tokens are nobody's
        (lambda own: [*own, dataclasses.replace(own[-1], start=own[-1].end - 1, reward=0.0)], "do not cover"),
        (lambda own: [*own[:-1], dataclasses.replace(own[-1], reward=1e39)], "not finite"),  # as float32
        (lambda own: [*own, Turn(role="policy", start=2, end=4, reward=1.0)], "without a policy token"),
    ],
)
def test_turns_that_cannot_be_trained_on_are_faults(change: Any, reason: str) -> None:
    sound, another, other = trajectories()
    broken = dataclasses.replace(sound, turns=change(list(sound.turns)))
    rows = from_shard("s", decode(encode([other, broken, another])), incarnation="a0", with_turns=True)
    assert set(rows.faults) == {1}
    assert reason in rows.faults[1]
    assert from_shard("s", decode(encode([other, broken])), incarnation="a0").faults == {}, "else nobody looks"


def test_a_value_of_a_turn_at_its_last_policy_token() -> None:
    silent = dataclasses.replace(trajectories()[0], loss_mask=np.zeros(14, bool))
    rows = from_trajectories("s", [*trajectories(), silent], incarnation="a0")
    assert rows.turns is not None
    expected = np.zeros(rows.offsets[-1])
    row, mask = rows.offsets[:-1], rows.loss_mask
    expected[[row[0] + 5, row[0] + 13, row[1] + 8, row[2] + 5, row[2] + 11]] = [1, 2, 3, 4, 5]
    np.testing.assert_array_equal(turns.at_ends(rows.turns, np.arange(1.0, 8.0), mask, rows.offsets), expected)
    # Where the last token of a turn is not the policy's, the one before it is paid.
    mask = mask.copy()
    mask[row[1] + 8] = False
    expected[[row[1] + 7, row[1] + 8]] = [3, 0]
    np.testing.assert_array_equal(turns.at_ends(rows.turns, np.arange(1.0, 8.0), mask, rows.offsets), expected)


def test_a_value_of_a_turn_at_each_of_its_tokens() -> None:
    rows = from_trajectories("s", trajectories(), incarnation="a0")
    assert rows.turns is not None
    values = np.arange(1.0, 6.0)
    expected = []
    for each in trajectories():
        own = np.zeros(each.num_tokens)
        for turn in each.turns:
            if turn.role == "policy":
                own[turn.start : turn.end] = values[0]
                values = values[1:]
        expected.append(own)
    found = turns.spread(rows.turns, np.arange(1.0, 6.0), rows.offsets)
    np.testing.assert_array_equal(found, np.concatenate(expected))
    np.testing.assert_array_equal(found != 0, rows.loss_mask)

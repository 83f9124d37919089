"""Age at consumption."""

import numpy as np
import pytest

from tunix_core.rl.staleness import histogram, mean_staleness, staleness, within_bound

VERSIONS = np.array([7, 6, 3, 2, -1])


def test_golden_values() -> None:
    """Before the step at clock 7; -1 has no policy token."""
    assert staleness(7, VERSIONS).tolist() == [0, 1, 4, 5, 0]
    assert within_bound(7, VERSIONS, 4).tolist() == [True, True, True, False, True]
    assert within_bound(7, VERSIONS, 0).tolist() == [True, False, False, False, True]
    assert mean_staleness(7, VERSIONS) == 2.5
    assert histogram(staleness(7, VERSIONS), 4).tolist() == [2, 1, 0, 0, 1, 1]


def test_against_the_loop() -> None:
    rng = np.random.default_rng(0)
    versions = rng.integers(-1, 12, 200)
    ages = [0 if v < 0 else 11 - v for v in versions.tolist()]
    assert staleness(11, versions).tolist() == ages
    assert within_bound(11, versions, 3).tolist() == [age <= 3 for age in ages]
    assert histogram(ages, 3).tolist() == [*(ages.count(i) for i in range(4)), sum(age > 3 for age in ages)]
    with_policy = [age for age, v in zip(ages, versions.tolist(), strict=True) if v >= 0]
    np.testing.assert_allclose(mean_staleness(11, versions), sum(with_policy) / len(with_policy))


def test_a_step_ages_everything_by_one() -> None:
    versions = np.arange(5)
    np.testing.assert_array_equal(staleness(9, versions), staleness(8, versions) + 1)
    assert mean_staleness(9, versions) == mean_staleness(8, versions) + 1


def test_nothing_to_count() -> None:
    assert mean_staleness(3, np.array([], int)) == 0
    assert mean_staleness(3, np.array([-1])) == 0
    assert histogram(np.array([], int), 2).tolist() == [0, 0, 0, 0]


def test_a_version_ahead_of_the_clock_is_refused() -> None:
    with pytest.raises(ValueError, match=r"staleness -2: .*ahead of the clock"):
        histogram(staleness(3, np.array([5])), 4)

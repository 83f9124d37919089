import numpy as np
import pytest

from tunix_core.actor.planning import FULL, MAX_WAITS, best_rows, decode_plan, prefill_shape, sizes

ROWS = (8, 16, 32, 64)


def test_sizes_halve_and_round_up() -> None:
    assert sizes(64, 4) == ROWS
    assert sizes(9, 3) == (3, 5, 9)
    assert sizes(8, 2, factor=4) == (2, 8)
    assert sizes(2, 6) == (1, 2)
    assert sizes(4, 3, factor=4, smallest=2) == (2, 4)
    assert sizes(1, 3, smallest=2) == (2,)


@pytest.mark.parametrize(
    ("num", "overhead", "expected"), [(3, 8, 8), (20, 8, 16), (30, 8, 32), (64, 8, 64), (9, 256, 16)]
)
def test_the_size_at_which_a_row_costs_least(num: int, overhead: float, expected: int) -> None:
    assert best_rows(num, ROWS, overhead) == expected


def test_rows_are_planned_once_fit_and_are_never_left_for_long() -> None:
    rng = np.random.default_rng(0)
    waits = np.zeros(80, int)
    contexts = rng.integers(0, 3, 80)
    filled = []
    for _ in range(200):
        live = np.flatnonzero(rng.random(80) < rng.choice([0.02, 0.3, 0.9]))
        waits[live] += 1
        plan = decode_plan(contexts[live].tolist(), waits[live].tolist(), ROWS, 8.0)
        rows = [row for dispatch in plan for row in dispatch.rows]
        assert len(set(rows)) == len(rows)
        assert bool(rows) == (len(live) > 0)
        for dispatch in plan:
            assert dispatch.num_rows in ROWS
            assert 0 < len(dispatch.rows) <= dispatch.num_rows
            assert dispatch.context >= contexts[live[dispatch.rows]].max()
        waits[live[rows]] = 0
        assert waits[live].max(initial=0) < MAX_WAITS + 1
        filled += [len(dispatch.rows) / dispatch.num_rows for dispatch in plan[:-1]]
    assert np.mean(np.array(filled) >= FULL) > 0.7


def test_short_contexts_do_not_pay_for_long_ones() -> None:
    plan = decode_plan([0] * 8 + [2] * 8, [1] * 16, (8, 16), 8.0)
    assert sorted(dispatch.context for dispatch in plan) == [0, 2]


def test_a_chunk_is_no_larger_than_what_there_is_to_read() -> None:
    shapes = [(rows, chunk) for rows in (2, 8) for chunk in (8, 32)]
    assert prefill_shape([5], shapes, 8.0) == (2, 8)
    assert prefill_shape([200], shapes, 8.0) == (2, 32)
    assert prefill_shape([7] * 10, shapes, 8.0) == (8, 8)
    assert prefill_shape([60] * 10, shapes, 8.0) == (8, 32)

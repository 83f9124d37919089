import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunix_core.config_loading import load_recipe
from tunix_core.data.packing import Layout, PackedArrays, best_fit, fit_groups, pack, size_for, window_sizes


def test_golden_layout() -> None:
    layout = best_fit(np.array([3, 7, 5, 2, 3]), 10)
    # 7 opens window 0, 5 window 1, the first 3 fits window 0 exactly, the second window 1, 2 fills it.
    assert layout.window.tolist() == [0, 0, 1, 1, 1]
    assert layout.start.tolist() == [7, 0, 0, 8, 5]
    assert layout.num_windows == 2


@given(st.lists(st.integers(1, 16), max_size=60), st.integers(16, 40))
def test_every_token_has_its_own_place(lengths: list[int], width: int) -> None:
    layout = best_fit(np.array(lengths, np.int64), width)
    taken = np.zeros((layout.num_windows, width), int)
    for window, start, length in zip(layout.window, layout.start, lengths, strict=True):
        assert start + length <= width
        taken[window, start : start + length] += 1
    assert taken.max(initial=0) <= 1
    assert taken.sum() == sum(lengths)
    again = best_fit(np.array(lengths, np.int64), width)
    assert again.window.tolist() == layout.window.tolist()
    assert again.start.tolist() == layout.start.tolist()


@given(st.lists(st.integers(1, 16), min_size=1, max_size=60), st.integers(16, 40))
def test_best_fit_leaves_no_two_windows_that_fit_into_one(lengths: list[int], width: int) -> None:
    layout = best_fit(np.array(lengths), width)
    load = np.bincount(layout.window, np.array(lengths), layout.num_windows)
    assert len(load) == 1 or np.sort(load)[:2].sum() > width


@given(st.lists(st.integers(1, 12), min_size=1, max_size=40))
def test_worst_case_bound_holds(lengths: list[int]) -> None:
    width, context = 30, 12
    assert best_fit(np.array(lengths), width).num_windows <= -(-len(lengths) // (width // context))


def test_packed_equals_a_loop() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 17, 23)
    total = int(lengths.sum())
    tokens = rng.integers(1, 99, total)
    mask = rng.random(total) < 0.5
    logprobs = rng.normal(size=total)
    advantages, temperature = rng.normal(size=23), rng.uniform(0.5, 2, 23)
    same = rng.random(23) < 0.5
    layout = best_fit(lengths, 20)
    packed, by_token = (
        pack(
            layout,
            lengths,
            tokens=tokens,
            loss_mask=mask,
            behavior_logprobs=logprobs,
            advantages=given,
            temperature=temperature,
            equal_version=same,
            num_windows=layout.num_windows + 2,
            window_tokens=20,
        )
        for given in (advantages, logprobs)
    )
    offset, covered = 0, np.zeros((layout.num_windows + 2, 20), bool)
    for i, length in enumerate(lengths):
        w, s = layout.window[i], layout.start[i]
        own, source = (w, slice(s, s + length)), slice(offset, offset + length)
        earlier = int(((layout.window == w) & (layout.start < s)).sum())
        assert (packed.segment_ids[own] == earlier + 1).all()
        assert packed.positions[own].tolist() == list(range(length))
        assert packed.tokens[own].tolist() == tokens[source].tolist()
        expected_mask = mask[source].copy()
        expected_mask[0] = False  # nothing before it to be predicted from
        assert packed.loss_mask[own].tolist() == expected_mask.tolist()
        assert packed.equal_version[own].tolist() == (expected_mask & same[i]).tolist()
        np.testing.assert_array_equal(packed.behavior_logprobs[own], logprobs[source].astype(np.float32))
        assert (packed.advantages[own] == np.float32(advantages[i])).all()
        np.testing.assert_array_equal(by_token.advantages[own], logprobs[source].astype(np.float32))
        assert (packed.temperature[own] == np.float32(temperature[i])).all()
        covered[own] = True
        offset += length
    assert (packed.segment_ids[~covered] == 0).all()
    assert not packed.loss_mask[~covered].any()
    assert (packed.temperature[~covered] == 1).all()


def _pack_at(window: list[int], start: list[int]) -> PackedArrays:
    """Two trajectories of 2 and 3 tokens at given places of two windows of 8."""
    layout = Layout(np.array(window, np.int32), np.array(start, np.int32), max(window) + 1)
    return pack(
        layout,
        np.array([2, 3]),
        tokens=np.array([1, 2, 3, 4, 5]),
        loss_mask=np.ones(5, bool),
        behavior_logprobs=np.full(5, -1.0),
        advantages=np.array([0.5, 2.0]),
        temperature=np.array([0.7, 0.8]),
        num_windows=2,
        window_tokens=8,
    )


def test_gaps_anywhere_are_padding() -> None:
    packed = _pack_at([1, 0], [3, 1])
    assert packed.tokens.tolist() == [[0, 3, 4, 5, 0, 0, 0, 0], [0, 0, 0, 1, 2, 0, 0, 0]]
    assert packed.positions.tolist() == [[0, 0, 1, 2, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0, 0]]
    assert packed.segment_ids.tolist() == [[0, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0, 0]]
    assert np.flatnonzero(packed.loss_mask).tolist() == [2, 3, 12]
    padding = packed.segment_ids == 0
    assert (packed.behavior_logprobs[padding] == 0).all()
    assert (packed.advantages[padding] == 0).all()
    assert (packed.temperature[padding] == 1).all()


def test_overlapping_trajectories_are_no_layout() -> None:
    with pytest.raises(AssertionError, match="overlap"):
        _pack_at([0, 0], [0, 1])


def test_window_counts_cover_the_worst_batch() -> None:
    config = load_recipe(
        "lookup",
        {
            "learner.max_windows": 20,
            "learner.windows_per_microbatch": 4,
            "learner.groups_per_batch": 8,
            "algorithm.group_size": 8,
            "learner.window_tokens": 64,
            "actor.context_tokens": 32,
        },
    )
    (size,) = window_sizes(config)
    assert size == (64, tuple(range(4, 33, 4)))  # 64 trajectories, two a window


def test_each_size_of_windows_covers_its_own_worst_batch() -> None:
    """With a context of 48: in windows of 16 and 32 the worst are 64 trajectories that fill one each, in 96 two do."""
    config = load_recipe(
        "lookup",
        {
            "learner.max_windows": 4,
            "learner.windows_per_microbatch": 4,
            "learner.groups_per_batch": 8,
            "algorithm.group_size": 8,
            "learner.window_tokens": 96,
            "learner.shorter_windows": [16, 32],
            "actor.context_tokens": 48,
        },
    )
    sizes = window_sizes(config)
    assert [(size.tokens, size.counts[-1]) for size in sizes] == [(16, 64), (32, 64), (96, 32)]
    assert [size_for(sizes, longest).tokens for longest in (0, 16, 17, 32, 33, 96)] == [16, 16, 32, 32, 96, 96]


def test_no_surplus_count_where_max_windows_covers_it() -> None:
    overrides = {"learner.groups_per_batch": 2, "learner.window_tokens": 256, "actor.context_tokens": 64}
    assert window_sizes(load_recipe("lookup", overrides))[-1].counts[-1] == 64


@pytest.mark.parametrize(("max_windows", "expected"), [(1, 1), (2, 2), (3, 3), (0, 0)])
def test_groups_that_fit(max_windows: int, expected: int) -> None:
    assert fit_groups([np.array([10, 5])] * 3, 16, max_windows) == expected

"""Capacity, shares, target and throttle, each by itself."""

import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunix_core.rl.pacing import TargetController, Throttle, admission_open, capacity_groups, share


def test_capacity_golden_values() -> None:
    """Batches of 32 groups, target 2: 96 in all."""
    assert capacity_groups(target=2, groups_per_batch=32, queued_fresh=0, in_step=0) == 96
    assert capacity_groups(target=2, groups_per_batch=32, queued_fresh=20, in_step=32) == 44
    assert capacity_groups(target=2, groups_per_batch=32, queued_fresh=90, in_step=32) == 0
    assert capacity_groups(target=0, groups_per_batch=32, queued_fresh=31, in_step=0) == 1
    assert capacity_groups(target=0, groups_per_batch=32, queued_fresh=32, in_step=0, throttled_batches=1) == 32


@given(st.integers(0, 9), st.integers(1, 50), st.integers(0, 300), st.integers(0, 1))
def test_a_waiting_learner_can_always_complete_its_batch(target: int, batch: int, queued: int, throttled: int) -> None:
    capacity = capacity_groups(
        target=target, groups_per_batch=batch, queued_fresh=queued, in_step=0, throttled_batches=throttled
    )
    assert capacity >= max(0, batch - queued)
    assert capacity + queued <= max(queued, (target + 1 + throttled) * batch)


@given(st.integers(1, 40), st.integers(0, 200))
def test_shares_add_up_and_differ_by_at_most_one(num_actors: int, capacity: int) -> None:
    shares = [share(rank, num_actors, capacity) for rank in range(num_actors)]
    assert sum(shares) == capacity
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


def test_share_golden_values() -> None:
    assert [share(rank, 5, 3) for rank in range(5)] == [1, 1, 1, 0, 0]
    assert [share(rank, 3, 8) for rank in range(3)] == [3, 3, 2]


def test_at_bound_zero_admission_waits_for_the_clocks_weights() -> None:
    assert not admission_open(max_staleness=0, clock=3, published_version=2)
    assert admission_open(max_staleness=0, clock=3, published_version=3)
    assert admission_open(max_staleness=1, clock=3, published_version=2)


# ---- target --------------------------------------------------------------------------------------


def observe(
    controller: TargetController, num_steps: int, *, wait: float = 0.0, lag: int = 0, spare: float = 0.0
) -> None:
    for _ in range(num_steps):
        controller.observe_step(wait_seconds=wait, step_seconds=10.0, publish_lag_steps=lag, spare_batches=spare)


@pytest.mark.parametrize(
    ("bound", "lag", "ceiling"), [(4, 1, 2), (4, 0, 3), (4, 2, 1), (4, 9, 0), (1, 0, 0), (0, 0, 0)]
)
def test_ceiling_leaves_room_for_the_lag(bound: int, lag: int, ceiling: int) -> None:
    controller = TargetController(max_staleness=bound)
    observe(controller, 100, wait=5.0, lag=lag)
    assert controller.ceiling == controller.target == ceiling


def test_starts_at_the_top() -> None:
    """Of what a lag of one step leaves, until the lag is known."""
    assert TargetController(max_staleness=4).target == 2
    assert TargetController(max_staleness=1).target == 0


def test_raised_by_one_waiting_step_then_settles() -> None:
    controller = TargetController(max_staleness=9, target=1)
    observe(controller, 1, wait=1.0)
    assert controller.target == 2
    observe(controller, 2, wait=1.0)  # what the raise admitted is not there yet
    assert controller.target == 2
    observe(controller, 1, wait=1.0)
    assert controller.target == 3


def test_lowered_slowly_and_only_with_a_batch_to_spare() -> None:
    controller = TargetController(max_staleness=9, target=5)
    observe(controller, 40, spare=0.9)
    assert controller.target == 5
    observe(controller, 8, spare=1.1)
    assert controller.target == 4
    observe(controller, 7, spare=1.1)
    assert controller.target == 4
    observe(controller, 1000, spare=1.1)
    assert controller.target == 0


def test_a_lowering_that_made_the_learner_wait_is_tried_later_the_next_time() -> None:
    controller = TargetController(max_staleness=9, target=5)
    for patience in (8, 16, 32):
        observe(controller, patience - 1, spare=1.0)
        assert controller.target == 5
        observe(controller, 1, spare=1.0)
        assert controller.target == 4
        observe(controller, 1, wait=1.0)
        assert controller.target == 5
        observe(controller, controller.SETTLING_STEPS, wait=1.0)


def test_waiting_of_a_hundredth_of_a_step_is_none() -> None:
    controller = TargetController(max_staleness=9, target=1)
    observe(controller, 5, wait=0.1)
    assert controller.target == 1


def test_without_a_count_of_what_is_spare_it_goes_by_trial() -> None:
    controller = TargetController(max_staleness=9, target=5)
    for _ in range(8):
        controller.observe_step(wait_seconds=0.0, step_seconds=10.0, publish_lag_steps=0)
    assert controller.target == 4


@given(
    st.integers(0, 6),
    st.lists(st.tuples(st.floats(0, 20), st.integers(0, 8), st.none() | st.floats(-1, 4)), max_size=60),
    st.integers(0, 60),
)
def test_within_its_range_and_the_same_after_a_restart(
    bound: int, steps: list[tuple[float, int, float | None]], restart_at: int
) -> None:
    whole, restarted = TargetController(max_staleness=bound), TargetController(max_staleness=bound)
    for i, (wait, lag, spare) in enumerate(steps):
        if i == restart_at:
            state = json.loads(json.dumps(restarted.state()))
            restarted = TargetController(max_staleness=bound)
            restarted.restore(state)
        for controller in (whole, restarted):
            controller.observe_step(wait_seconds=wait, step_seconds=2.0, publish_lag_steps=lag, spare_batches=spare)
            assert 0 <= controller.target <= controller.ceiling <= max(0, bound - 1)
    assert whole == restarted


def test_restored_under_a_tighter_bound() -> None:
    state = TargetController(max_staleness=9, target=6).state()
    controller = TargetController(max_staleness=3)
    controller.restore(state)
    assert controller.target == controller.ceiling == 1


def test_a_foreign_state_is_refused() -> None:
    with pytest.raises(ValueError, match="pacing state has the fields"):
        TargetController(max_staleness=4).restore({"target": 2})


# ---- throttle ------------------------------------------------------------------------------------


def test_throttle_golden_sequence() -> None:
    throttle = Throttle(max_mean_staleness=2.0, max_throttle_seconds=30.0)
    assert throttle.decide(2.0, 100.0) == "step"
    assert throttle.decide(2.1, 101.0) == "wait"
    assert throttle.decide(2.1, 130.9) == "wait"
    assert throttle.decide(1.9, 130.95) == "step"
    assert throttle.decide(2.1, 131.0) == "override"
    throttle.reset()
    assert throttle.decide(2.1, 140.0) == "wait"
    assert throttle.decide(2.1, 170.0) == "override"


def test_throttle_at_its_limits() -> None:
    assert Throttle(max_mean_staleness=0.0, max_throttle_seconds=0.0).decide(0.5, 7.0) == "override"
    assert Throttle(max_mean_staleness=math.inf, max_throttle_seconds=0.0).decide(1e9, 7.0) == "step"


def test_no_jax_and_no_clock() -> None:
    """The processes that only pace (actors' wire, tests, reports) do not pay for JAX."""
    program = (
        "import sys, tunix_core.rl.pacing, tunix_core.rl.staleness, tunix_core.rl.advantages; "
        "sys.exit(any(name.split('.')[0] == 'jax' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

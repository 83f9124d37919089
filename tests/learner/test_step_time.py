"""Each moment of a step is in one part: with a scripted clock the parts are known, and add up to the wall time."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunix_core.learner.step_time import Preparation, StepTimer


class Script:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_batch_that_was_ready_costs_only_device_and_bookkeeping() -> None:
    clock = Script()
    timer = StepTimer(clock)
    clock.now = 250.0
    timer.start()
    clock.now += 0.25
    timer.wait_begins()
    clock.now += 0.5
    timer.lap("wait_for_data")
    timer.received(Preparation(200.0, 201.0, 202.0, 203.0))
    timer.lap("other")
    clock.now += 2.0
    assert timer.lap("device") == 2.0
    clock.now += 0.125
    times = timer.finish()
    assert dataclasses.asdict(times) == {
        "wait_for_data_seconds": 0.5,
        "throttled_seconds": 0.0,
        "pack_seconds": 0.0,
        "transfer_seconds": 0.0,
        "device_seconds": 2.0,
        "other_seconds": 0.375,
    }
    assert times.wall_seconds == clock.now - 250.0
    assert times.columns()["step_wall_seconds"] == times.wall_seconds


def test_a_standstill_is_split_by_what_the_preparation_did_in_it() -> None:
    """Waits from 100 to 110: throttled to 104, no groups to 105; then choice, packing, transfer, the record."""
    clock = Script()
    timer = StepTimer(clock)
    timer.wait_begins()
    clock.now = 104.0
    timer.lap("throttled")
    clock.now = 110.0
    timer.lap("wait_for_data")
    timer.received(Preparation(105.0, 107.0, 108.5, 109.0))
    clock.now = 113.0
    timer.lap("device")
    times = timer.finish()
    assert times.throttled_seconds == 4.0
    assert (times.pack_seconds, times.transfer_seconds, times.device_seconds) == (2.0, 1.5, 3.0)
    assert times.wait_for_data_seconds == 2.0, "104 to 105, and 109 to 110 until it was noticed"
    assert times.other_seconds == 0.5, "the record"
    assert times.standstill_seconds == 5.5
    assert times.wall_seconds == 13.0


def test_only_what_lies_in_the_standstill_counts() -> None:
    """Packing had begun while the device still worked."""
    clock = Script()
    timer = StepTimer(clock)
    clock.now = 103.0
    timer.lap("device")
    timer.wait_begins()
    clock.now = 106.0
    timer.lap("wait_for_data")
    timer.received(Preparation(101.0, 104.0, 105.0, 106.0))
    times = timer.finish()
    assert (times.pack_seconds, times.transfer_seconds, times.other_seconds) == (1.0, 1.0, 1.0)
    assert (times.wait_for_data_seconds, times.device_seconds, times.wall_seconds) == (0.0, 3.0, 6.0)


seconds = st.integers(0, 64).map(lambda quarters: quarters / 4)


@given(st.lists(st.tuples(seconds, seconds, seconds, st.tuples(*[seconds] * 5), seconds), min_size=1, max_size=5))
def test_the_parts_add_up_whatever_happens(steps: list) -> None:
    clock = Script()
    timer = StepTimer(clock)
    timer.start()
    began, walls = clock.now, 0.0
    for busy, throttled, waiting, (lead, *making), device in steps:
        clock.now += busy
        timer.wait_begins()
        since = clock.now
        clock.now += throttled
        timer.lap("throttled")
        clock.now += waiting
        timer.lap("wait_for_data")
        moments = [since - 8 + lead]
        for part in making[:3]:
            moments.append(min(moments[-1] + part, clock.now))
        timer.received(Preparation(*moments))
        clock.now += device
        timer.lap("device")
        times = timer.finish()
        assert min(dataclasses.astuple(times)) >= 0
        walls += times.wall_seconds
    assert walls == pytest.approx(clock.now - began)

"""The pacing code in a run in virtual time: it never stops, and it wastes little."""

import dataclasses
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rl.simulator import Outcome, Setting, Simulator


@st.composite
def setting_space(draw: st.DrawFn) -> Setting:
    """Everything that the configuration accepts, in small."""
    num_actors = draw(st.integers(1, 9))
    max_staleness = draw(st.integers(0, 6))
    snapshot_interval = draw(st.integers(1, max(1, max_staleness)))
    return Setting(
        num_actors=num_actors,
        groups_per_actor=draw(st.integers(1, 4)),
        group_size=draw(st.integers(2, 4)),
        groups_per_batch=draw(st.integers(1, 12)),
        step_seconds=draw(st.sampled_from([0.2, 2.0, 10.0])),
        episode_seconds=draw(st.sampled_from([0.1, 1.0, 6.0])),
        sigma=draw(st.sampled_from([0.0, 1.0, 1.6])),
        episode_limit_seconds=30.0,
        num_deaths=draw(st.integers(0, num_actors - 1)),
        max_staleness=max_staleness,
        max_mean_staleness=draw(st.sampled_from([0.0, 0.5, 2.0, math.inf])),
        max_throttle_seconds=draw(st.sampled_from([0.0, 5.0, 30.0])),
        snapshot_interval_steps=snapshot_interval,
        # Where the gate refuses everything for longer than the bound, no pacing can help.
        refused_in_a_row=draw(st.integers(0, max(1, max_staleness) // snapshot_interval - 1)),
        publish_seconds=draw(st.sampled_from([0.05, 1.0, 15.0])),
        flush_seconds=draw(st.sampled_from([0.0, 0.5, 10.0])),
        control_interval_seconds=draw(st.sampled_from([0.5, 5.0])),
        control_delay_seconds=draw(st.sampled_from([0.05, 1.0])),
        measure_spare=draw(st.booleans()),
        duration_seconds=1500.0,
        seed=draw(st.integers(0, 2**16)),
    )


def patience_seconds(s: Setting) -> float:
    """The longest that a working run can be without a step."""
    rounds = 2 + math.ceil(s.groups_per_batch / (s.groups_per_actor * (s.num_actors - s.num_deaths)))
    control = s.control_interval_seconds + s.control_delay_seconds
    group = s.episode_limit_seconds + s.flush_seconds + 2 * control
    return s.publish_seconds + s.max_throttle_seconds + rounds * group + s.detection_seconds + control


@settings(max_examples=80, deadline=None)
@given(setting_space())
def test_no_setting_stops_the_learner(setting: Setting) -> None:
    out = Simulator(setting).run()
    silence = max(out.longest_gap_seconds, setting.duration_seconds - out.last_step_at)
    assert silence <= patience_seconds(setting) + setting.step_seconds
    assert out.max_staleness_seen <= setting.max_staleness
    assert all(0 <= target <= max(0, setting.max_staleness - 1) for target in out.targets)


def busy(out: Outcome, setting: Setting) -> float:
    return out.late_busy_seconds / (setting.duration_seconds / 2)


def test_headroom_discards_little_and_keeps_the_learner_busy() -> None:
    """The pool and learner of the control study: 64 actors, groups of 8, 10 s steps, bound 4."""
    adaptive, at_the_bound, unpaced = (
        Simulator(Setting(pacing=pacing)).run() for pacing in ("adaptive", "fixed", "none")
    )
    assert adaptive.discard_fraction < 0.05
    assert busy(adaptive, Setting()) > 0.99
    assert adaptive.discard_fraction < at_the_bound.discard_fraction < unpaced.discard_fraction
    assert adaptive.mean_staleness < at_the_bound.mean_staleness
    assert set(adaptive.targets[-50:]) == {2}


def test_a_fast_pool_needs_little_headroom_and_a_heavy_tail_much() -> None:
    fast = Simulator(Setting(episode_seconds=1.0)).run()
    heavy = Simulator(Setting(sigma=1.6)).run()
    assert fast.targets[-1] == 1
    assert heavy.targets[-1] == 3
    assert fast.late_discard_fraction < 0.01
    assert min(busy(fast, Setting()), busy(heavy, Setting())) > 0.98


def test_counting_what_is_spare_wastes_less_time_than_trial() -> None:
    counted, tried = (Simulator(Setting(measure_spare=measured)).run() for measured in (True, False))
    assert counted.steps > tried.steps
    assert tried.discard_fraction < 0.05


def test_more_actors_than_groups() -> None:
    """Shares of zero: the pool is four times what is needed, and discards hardly more."""
    setting = Setting(num_actors=256)
    out = Simulator(setting).run()
    assert out.discard_fraction < 0.05
    assert busy(out, setting) > 0.99


def test_on_policy_is_exact() -> None:
    out = Simulator(Setting(max_staleness=0, duration_seconds=600.0)).run()
    assert out.steps >= 10
    assert out.max_staleness_seen == 0


def test_throttle_keeps_the_mean_and_overrides_are_counted() -> None:
    small = Setting(num_actors=8, groups_per_batch=20)
    strict = dataclasses.replace(small, max_mean_staleness=1.0, max_throttle_seconds=1e9)
    out = Simulator(strict).run()
    assert out.steps >= 20
    assert out.mean_staleness <= 1.0
    assert out.overrides == 0
    # A mean that cannot be reached: weights are published every fourth step only.
    hopeless = dataclasses.replace(small, max_mean_staleness=0.0, max_throttle_seconds=5.0, snapshot_interval_steps=4)
    out = Simulator(hopeless).run()
    assert out.overrides > 0
    assert out.steps >= 20

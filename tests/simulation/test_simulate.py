"""The pacing code in a run in virtual time: it never stops, and it wastes little."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunix_core.errors import ConfigError
from tunix_core.simulation.outcome import Outcome
from tunix_core.simulation.setting import Faults, Setting
from tunix_core.simulation.simulate import simulate


@st.composite
def setting_space(draw: st.DrawFn) -> Setting:
    """Everything that the configuration accepts, in small."""
    max_staleness = draw(st.integers(0, 6))
    snapshot_interval = draw(st.integers(1, max(1, max_staleness)))
    return Setting(
        num_actors=draw(st.integers(1, 9)),
        groups_per_actor=draw(st.integers(1, 4)),
        group_size=draw(st.integers(2, 4)),
        groups_per_batch=draw(st.integers(1, 12)),
        step_seconds=draw(st.sampled_from([0.2, 2.0, 10.0])),
        episode_seconds=draw(st.sampled_from([0.1, 1.0, 6.0])),
        sigma=draw(st.sampled_from([0.0, 1.0, 1.6])),
        episode_limit_seconds=30.0,
        max_staleness=max_staleness,
        max_mean_staleness=draw(st.sampled_from([0.0, 0.5, 2.0, math.inf])),
        max_throttle_seconds=draw(st.sampled_from([0.0, 5.0, 30.0])),
        snapshot_interval_steps=snapshot_interval,
        # Where the gate refuses everything for longer than the bound, no pacing can help.
        refused_in_a_row=draw(st.integers(0, max(1, max_staleness) // snapshot_interval - 1)),
        publish_seconds=draw(st.sampled_from([0.05, 1.0, 15.0])),
        flush_seconds=draw(st.sampled_from([0.0, 0.5, 10.0])),
        store_seconds=draw(st.sampled_from([0.0, 0.5])),
        reader_poll_seconds=0.25,
        control_interval_seconds=draw(st.sampled_from([0.5, 5.0])),
        control_delay_seconds=draw(st.sampled_from([0.05, 1.0])),
        order=draw(st.sampled_from(["oldest_first", "freshest_first", "largest_advantage_first"])),
        max_reuse=draw(st.integers(1, max_staleness + 1)),
        measure_spare=draw(st.booleans()),
        faults=Faults(
            seconds_between_deaths=draw(st.sampled_from([0.0, 200.0])),
            restart_seconds=draw(st.sampled_from([1.0, 20.0])),
            seconds_between_spikes=draw(st.sampled_from([0.0, 300.0])),
            seconds_between_outages=draw(st.sampled_from([0.0, 300.0])),
        ),
        duration_seconds=1500.0,
        seed=draw(st.integers(0, 2**16)),
    )


def patience_seconds(s: Setting) -> float:
    """The longest that a working run can be without a step."""
    faults = s.faults
    factor = faults.spike_factor if faults.seconds_between_spikes else 1.0
    control = s.control_interval_seconds + s.control_delay_seconds
    group = s.episode_limit_seconds * factor + s.flush_seconds + 20 * s.store_seconds + 2 * control
    outage = faults.outage_seconds if faults.seconds_between_outages else 0.0
    # A death loses what its actor had under way: once more from the start, and perhaps again.
    deaths = 4 if faults.seconds_between_deaths else 1
    rounds = 2 + math.ceil(s.groups_per_batch / (s.groups_per_actor * max(1, s.num_actors - deaths + 1)))
    away = faults.restart_seconds + faults.detection_seconds
    return s.publish_seconds + outage + s.max_throttle_seconds + deaths * (rounds * group + away) + control


def goes_on(setting: Setting) -> None:
    out = simulate(setting)
    assert out.silence_seconds <= patience_seconds(setting) + setting.step_seconds
    assert out.max_staleness <= setting.max_staleness
    assert all(0 <= step.target <= max(0, setting.max_staleness - 1) for step in out.steps)


@settings(max_examples=12, deadline=None)
@given(setting_space())
def test_no_setting_stops_the_learner(setting: Setting) -> None:
    goes_on(setting)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=400, deadline=None)
@given(setting_space())
def test_no_setting_of_many_stops_the_learner(setting: Setting) -> None:
    goes_on(setting)


def published(order: str = "first_in_first_out", **fields: object) -> Outcome:
    """The rules of the control study, which choose a batch when a step ends."""
    fields = {"strategy": "fixed", "prefetch": False, "order": order} | fields
    return simulate(Setting(**fields))


@pytest.mark.parametrize(
    ("fields", "busy", "discarded", "mean_staleness"),
    [
        ({"strategy": "unpaced"}, 0.993, 0.61, 3.9),
        ({"strategy": "unpaced", "sigma": 1.6}, 0.993, 0.41, 3.8),
        ({"target": 4, "count_step": False}, 0.993, 0.23, 3.7),
        ({"target": 4, "count_step": False, "sigma": 1.6}, 0.993, 0.24, 3.3),
        ({"target": 3, "order": "oldest_first", "sigma": 1.6}, 0.993, 0.105, 2.3),
        ({"target": 2, "order": "oldest_first"}, 0.993, 0.024, 2.1),
        ({"target": 2, "order": "oldest_first", "sigma": 1.6}, 0.81, 0.068, 1.6),
        ({"target": 1, "order": "oldest_first"}, 0.63, 0.004, 1.2),
        ({"target": 2, "order": "freshest_first"}, 0.987, 0.082, 1.8),
        ({"target": 2, "order": "oldest_first", "snapshot_interval_steps": 4}, 0.83, 0.23, 2.4),
        ({"target": 2, "order": "oldest_first", "flush_seconds": 30.0}, 0.67, 0.015, 2.2),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_the_control_study_comes_out_again(
    fields: dict[str, object], busy: float, discarded: float, mean_staleness: float
) -> None:
    """64 actors, groups of 8, 10 s steps, bound 4: the figures of an independent simulation, within its noise."""
    out = published(**fields)
    assert out.busy_fraction == pytest.approx(busy, abs=0.04)
    assert out.discarded_fraction == pytest.approx(discarded, abs=0.02 + 0.05 * discarded)
    assert out.mean_staleness == pytest.approx(mean_staleness, abs=0.15)


def test_headroom_discards_little_and_keeps_the_learner_busy() -> None:
    adaptive = simulate(Setting())
    assert adaptive.discarded_fraction < 0.05
    assert adaptive.busy_fraction > 0.99
    assert {step.target for step in adaptive.steps[-50:]} == {2}
    heavy = simulate(Setting(sigma=1.6))
    assert heavy.busy_fraction > 0.98, "no fixed target is right for both"
    assert heavy.steps[-1].target == 3
    fast = simulate(Setting(episode_seconds=1.0))
    assert fast.steps[-1].target == 1
    assert fast.discarded_token_fraction < 0.01


def test_the_published_rules_waste_more() -> None:
    bounded = {"episode_limit_seconds": 30.0, "num_actors": 96}
    headroom, unpaced, synchronous = (
        simulate(Setting(strategy=strategy, **bounded)) for strategy in ("headroom", "unpaced", "synchronous")
    )
    at_the_bound = published(target=4, count_step=False, **bounded)
    assert headroom.busy_fraction > 0.99
    assert headroom.discarded_token_fraction < 0.05
    assert headroom.discarded_fraction < at_the_bound.discarded_fraction / 5 < unpaced.discarded_fraction / 5
    assert headroom.mean_staleness < at_the_bound.mean_staleness
    assert synchronous.discarded == 0
    assert synchronous.max_staleness == 0
    assert synchronous.busy_fraction < 0.6 * headroom.busy_fraction


def test_no_rule_beats_headroom() -> None:
    """In order of merit: the tokens that each of them throws away, and the groups."""
    base = {"duration_seconds": 900.0, "order": "first_in_first_out"}
    rules = {
        "headroom": Setting(duration_seconds=900.0),
        "at the bound, first in first out": Setting(strategy="fixed", target=4, count_step=False, **base),
        "no pacing": Setting(strategy="unpaced", **base),
    }
    outcomes = {name: simulate(setting) for name, setting in rules.items()}
    by_groups = sorted(outcomes, key=lambda name: outcomes[name].discarded_fraction)
    by_tokens = sorted(outcomes, key=lambda name: outcomes[name].discarded_token_fraction)
    assert by_groups == by_tokens == list(rules)
    assert all(out.busy_fraction > 0.98 for out in outcomes.values()), "none of them makes the learner wait"


def test_reuse_makes_a_small_pool_do() -> None:
    """Half the groups that a learner could train on: it waits, or takes them twice; never over the bound."""
    small = Setting(num_actors=14, duration_seconds=900.0)
    once, twice = simulate(small), simulate(dataclasses.replace(small, max_reuse=2))
    assert once.reused == 0
    assert len(twice.steps) > 1.4 * len(once.steps)
    assert 0.5 * twice.consumed < twice.reused <= twice.consumed
    assert twice.max_staleness <= small.max_staleness
    assert sum(twice.staleness.values()) == twice.consumed + twice.reused


def test_counting_what_is_spare_wastes_less_time_than_trial() -> None:
    counted, tried = (simulate(Setting(measure_spare=measured)) for measured in (True, False))
    assert len(counted.steps) >= len(tried.steps)
    assert tried.discarded_fraction < 0.05


def test_more_actors_than_groups() -> None:
    """Shares of zero: the pool is four times what is needed, and discards hardly more."""
    out = simulate(Setting(num_actors=256))
    assert out.discarded_fraction < 0.05
    assert out.busy_fraction > 0.99


def test_on_policy_is_exact() -> None:
    out = simulate(Setting(max_staleness=0, duration_seconds=600.0))
    assert len(out.steps) >= 10
    assert out.max_staleness == 0


def test_throttle_keeps_the_mean_and_overrides_are_counted() -> None:
    small = Setting(num_actors=8, groups_per_batch=20)
    strict = dataclasses.replace(small, max_mean_staleness=1.0, max_throttle_seconds=1e9)
    out = simulate(strict)
    assert len(out.steps) >= 20
    assert out.mean_staleness <= 1.0
    assert out.overrides == 0
    # A mean that cannot be reached: weights are published every fourth step only.
    hopeless = dataclasses.replace(small, max_mean_staleness=0.0, max_throttle_seconds=5.0, snapshot_interval_steps=4)
    out = simulate(hopeless)
    assert out.overrides > 0
    assert len(out.steps) >= 20


def test_a_seed_fixes_everything() -> None:
    setting = Setting(duration_seconds=300.0, faults=Faults(seconds_between_deaths=20.0, seconds_between_spikes=50.0))
    first, again, other = (simulate(dataclasses.replace(setting, seed=seed)).to_dict() for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_misfortunes_cost_something_and_stop_nothing() -> None:
    def run(**faults: float) -> Outcome:
        return simulate(Setting(num_actors=96, duration_seconds=900.0, faults=Faults(**faults)))

    calm, deaths = run(), run(seconds_between_deaths=5.0)
    spikes = run(seconds_between_spikes=150.0, spike_factor=8.0)
    outages = run(seconds_between_outages=200.0, outage_seconds=40.0)
    assert calm.lost == 0
    assert deaths.lost > 100
    assert spikes.discarded > calm.discarded
    assert outages.discarded > calm.discarded
    for out in (deaths, spikes, outages):
        assert len(out.steps) > 50
        assert out.max_staleness <= 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_actors", 0),
        ("step_seconds", 0.0),
        ("snapshot_interval_steps", 9),
        ("strategy", "greedy"),
        ("order", "random"),
        ("max_reuse", 0),
        ("max_reuse", 6),
        ("sigma", -1.0),
        ("store_seconds", -1.0),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        Setting(**{field: value})


@pytest.mark.slow
def test_a_day_of_ten_thousand_actors() -> None:
    """Episodes within the bound: under 5 % of the tokens are discarded, and the learner hardly waits."""
    out = simulate(
        Setting(
            num_actors=10_000,
            groups_per_actor=1,
            episode_seconds=30.0,
            episode_limit_seconds=150.0,
            groups_per_batch=2000,
            step_seconds=60.0,
            publish_seconds=15.0,
            flush_seconds=10.0,
            reader_poll_seconds=1.0,
            control_interval_seconds=5.0,
            faults=Faults(seconds_between_deaths=30.0),
            duration_seconds=86_400.0,
        )
    )
    assert out.busy_fraction > 0.99
    assert out.discarded_token_fraction < 0.05
    assert out.max_staleness <= 4

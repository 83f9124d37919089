"""Pool, learner, publisher and their misfortunes, put together. Nothing sleeps; a seed fixes everything."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from tunix_core.rl.pacing import shares
from tunix_core.simulation.durations import Draw, lognormal
from tunix_core.simulation.events import Events
from tunix_core.simulation.learner import Learner
from tunix_core.simulation.outcome import Outcome
from tunix_core.simulation.pool import Pool
from tunix_core.simulation.setting import Setting


def simulate(setting: Setting, draw: Draw | None = None) -> Outcome:
    """Run it.

    Args:
        setting: what runs, and for how long.
        draw: how long groups take; by default as `setting` says.
    """
    return _Simulation(setting, draw or lognormal(setting)).run()


class _Simulation:
    def __init__(self, setting: Setting, draw: Draw) -> None:
        self._setting = setting
        self._events = Events()
        self._outcome = Outcome(setting.duration_seconds)
        generator, self._fate = (np.random.default_rng([setting.seed, part]) for part in range(2))
        self._learner = Learner(
            setting, self._events, self._outcome, self._snapshot, lambda: int(self._pool.in_flight.sum())
        )
        self._pool = Pool(setting, self._events, generator, draw, self._learner.deliver)
        self._num_snapshots = 0
        self._outage_until = 0.0

    def run(self) -> Outcome:
        faults = self._setting.faults
        self._events.after(0.0, self._control)
        if self._setting.strategy == "synchronous":
            self._events.after(0.0, self._pool.hand_out)
        self._now_and_then(faults.seconds_between_deaths, self._kill)
        self._now_and_then(faults.seconds_between_spikes, self._spike)
        self._now_and_then(faults.seconds_between_outages, self._outage)
        self._events.run(self._setting.duration_seconds)
        self._outcome.lost = self._pool.lost
        return self._outcome

    # ---- the signal ----------------------------------------------------------------------------------

    def _control(self) -> None:
        self._learner.prepare()  # the throttle's deadline may have passed
        pool, order = self._pool, self._pool.order
        granted = shares(len(order), self._learner.capacity()) if len(order) else np.zeros(0, np.int64)
        arrive = functools.partial(pool.receive, self._learner.clock, granted, order, pool.take_read(), pool.lives)
        self._events.after(self._setting.control_delay_seconds, arrive)
        self._events.after(self._setting.control_interval_seconds, self._control)

    # ---- weights -------------------------------------------------------------------------------------

    def _snapshot(self, clock: int) -> None:
        s = self._setting
        if clock % s.snapshot_interval_steps:
            return
        self._num_snapshots += 1
        if self._num_snapshots % (s.refused_in_a_row + 1) == 0:
            wait = max(0.0, self._outage_until - self._events.now)
            self._events.after(wait + s.publish_seconds, functools.partial(self._publish, clock))

    def _publish(self, version: int) -> None:
        self._learner.published = max(self._learner.published, version)
        self._pool.publish(version)

    # ---- misfortunes ---------------------------------------------------------------------------------

    def _now_and_then(self, mean_seconds: float, action: Callable[[], None]) -> None:
        if mean_seconds <= 0:
            return

        def happen() -> None:
            action()
            self._events.after(float(self._fate.exponential(mean_seconds)), happen)

        self._events.after(float(self._fate.exponential(mean_seconds)), happen)

    def _kill(self) -> None:
        alive = self._pool.alive
        if not len(alive):
            return
        actor = int(self._fate.choice(alive))
        self._pool.kill(actor)
        faults = self._setting.faults
        self._events.after(faults.detection_seconds, functools.partial(self._pool.forget, actor))
        # Its next life is announced after the learner has noticed, or replaces it in the order of ranks.
        self._events.after(max(faults.restart_seconds, faults.detection_seconds), lambda: self._pool.revive(actor))

    def _spike(self) -> None:
        self._pool.slowdown = self._setting.faults.spike_factor

        def end() -> None:
            self._pool.slowdown = 1.0

        self._events.after(self._setting.faults.spike_seconds, end)

    def _outage(self) -> None:
        self._outage_until = self._events.now + self._setting.faults.outage_seconds

"""A run in virtual time: many actors, a publisher and a learner around the real pacing code.

Everything that decides (capacity, shares, target, throttle, bound) is `tunix_core.rl`; the rest is a
model of what surrounds it. A group takes as long as the slowest of its episodes, is flushed in a shard, and
is in flight for its actor until a pacing signal reports it read. The learner prepares the batch of the
next clock while it steps, as the real one does. Nothing sleeps; a seed fixes everything.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
import random
from collections.abc import Callable
from typing import Literal

from tunix_core.rl.pacing import TargetController, Throttle, admission_open, capacity_groups, share
from tunix_core.rl.staleness import mean_staleness


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One pool, one learner. The defaults are those of the control study in the design."""

    num_actors: int = 64
    groups_per_actor: int = 8
    """What an actor's slots hold at once."""
    group_size: int = 8
    groups_per_batch: int = 160
    step_seconds: float = 10.0
    episode_seconds: float = 4.0
    """Mean of a lognormal distribution."""
    sigma: float = 1.0
    episode_limit_seconds: float = math.inf
    """Episodes end here at the latest."""
    num_deaths: int = 0
    """Actors that die with what they have in flight, the highest ranks first, evenly over the run."""
    detection_seconds: float = 15.0
    """A dead actor keeps its rank, and its share, for so long."""
    max_staleness: int = 4
    max_mean_staleness: float = math.inf
    max_throttle_seconds: float = 30.0
    snapshot_interval_steps: int = 1
    refused_in_a_row: int = 0
    """Snapshots that the gate refuses after each one that it lets through."""
    publish_seconds: float = 1.0
    """From the end of a step to actors that run its weights."""
    flush_seconds: float = 2.0
    control_interval_seconds: float = 1.0
    control_delay_seconds: float = 1.0
    pacing: Literal["adaptive", "fixed", "none"] = "adaptive"
    """`fixed`: capacity at `fixed_target`, what the running step consumes not counted, first in first out."""
    fixed_target: int = 4
    measure_spare: bool = True
    """Tell the target controller how much was queued; else it goes by trial."""
    duration_seconds: float = 1500.0
    seed: int = 0


@dataclasses.dataclass
class Outcome:
    """Counts of groups; times of the second half of the run, when the target has settled."""

    steps: int = 0
    consumed: int = 0
    discarded: int = 0
    max_staleness_seen: int = 0
    staleness_sum: int = 0
    overrides: int = 0
    last_step_at: float = 0.0
    late_busy_seconds: float = 0.0
    late_consumed: int = 0
    late_discarded: int = 0
    targets: list[int] = dataclasses.field(default_factory=list)
    longest_gap_seconds: float = 0.0

    @property
    def discard_fraction(self) -> float:
        return self.discarded / max(1, self.discarded + self.consumed)

    @property
    def late_discard_fraction(self) -> float:
        return self.late_discarded / max(1, self.late_discarded + self.late_consumed)

    @property
    def mean_staleness(self) -> float:
        return self.staleness_sum / max(1, self.consumed)


class Simulator:
    """`run` once."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.outcome = Outcome()
        self._random = random.Random(setting.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._now = 0.0
        # Learner.
        self._clock = 0
        self._queue: list[int] = []  # versions of the groups that wait, by arrival
        self._prepared: list[int] | None = None
        self._override = False
        self._in_step: list[int] = []
        self._idle_since = 0.0
        self._throttled_at: float | None = None
        self._throttled_seconds = 0.0
        self._controller = TargetController(max_staleness=setting.max_staleness)
        self._throttle = Throttle(
            max_mean_staleness=setting.max_mean_staleness, max_throttle_seconds=setting.max_throttle_seconds
        )
        # Pool. `_read[i]` counts groups read since the last signal that was written.
        self._published = 0
        self._signal_clock = 0
        self._num_snapshots = 0
        n = setting.num_actors
        self._dead: set[int] = set()
        self._ranks = list(range(n))
        self._share = [0] * n
        self._in_flight = [0] * n
        self._running = [0] * n
        self._read = [0] * n

    def run(self) -> Outcome:
        self._at(0.0, self._control)
        s = self.setting
        for i in range(s.num_deaths):
            self._at((i + 1) * s.duration_seconds / (s.num_deaths + 1), lambda a=s.num_actors - 1 - i: self._die(a))
        while self._events:
            self._now, _, action = heapq.heappop(self._events)
            if self._now > self.setting.duration_seconds:
                break
            action()
        return self.outcome

    def _at(self, delay: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self._now + delay, self._num_events, action))

    @property
    def _late(self) -> bool:
        return self._now > self.setting.duration_seconds / 2

    # ---- the pool -------------------------------------------------------------------------------

    def _group_seconds(self) -> float:
        s = self.setting
        mu = math.log(s.episode_seconds) - s.sigma**2 / 2
        slowest = max(self._random.lognormvariate(mu, s.sigma) for _ in range(s.group_size))
        return min(slowest, s.episode_limit_seconds)

    def _die(self, actor: int) -> None:
        self._dead.add(actor)
        self._at(self.setting.detection_seconds, lambda: self._ranks.remove(actor))

    def _admit(self, actor: int) -> None:
        s = self.setting
        if actor in self._dead:
            return
        if s.max_staleness == 0 and self._published != self._signal_clock and s.pacing != "none":
            return  # its weights are not those of the signal's clock
        while self._running[actor] < s.groups_per_actor:
            if s.pacing != "none" and self._in_flight[actor] >= self._share[actor]:
                return
            self._running[actor] += 1
            self._in_flight[actor] += 1
            self._at(self._group_seconds(), functools.partial(self._finish_group, actor, self._published))

    def _finish_group(self, actor: int, version: int) -> None:
        if actor in self._dead:
            return
        self._running[actor] -= 1
        self._at(self._random.random() * self.setting.flush_seconds, lambda: self._read_group(actor, version))
        self._admit(actor)

    def _publish(self, version: int) -> None:
        self._published = max(self._published, version)
        for actor in range(self.setting.num_actors):
            self._admit(actor)

    # ---- the signal -----------------------------------------------------------------------------

    def _control(self) -> None:
        s = self.setting
        self._prepare()  # the throttle's deadline may have passed
        fresh = sum(self._clock - v <= s.max_staleness for v in self._queue)
        capacity = 0
        if s.pacing == "fixed":
            capacity = capacity_groups(
                target=s.fixed_target, groups_per_batch=s.groups_per_batch, queued_fresh=fresh, in_step=0
            )
        elif admission_open(max_staleness=s.max_staleness, clock=self._clock, published_version=self._published):
            capacity = capacity_groups(
                target=self._controller.target,
                groups_per_batch=s.groups_per_batch,
                queued_fresh=fresh + len(self._prepared or ()),
                in_step=len(self._in_step),
                throttled_batches=int(self._throttled_at is not None),
            )
        clock, read = self._clock, self._read
        self._read = [0] * s.num_actors
        ranks = list(self._ranks)
        self._at(s.control_delay_seconds, lambda: self._receive(clock, capacity, read, ranks))
        self._at(s.control_interval_seconds, self._control)

    def _receive(self, clock: int, capacity: int, read: list[int], ranks: list[int]) -> None:
        self._signal_clock = clock
        for rank, actor in enumerate(ranks):
            self._in_flight[actor] -= read[actor]
            self._share[actor] = share(rank, len(ranks), capacity)
            self._admit(actor)

    # ---- the learner ----------------------------------------------------------------------------

    def _read_group(self, actor: int, version: int) -> None:
        self._read[actor] += 1
        self._queue.append(version)
        self._prepare()

    def _prepare(self) -> None:
        """The batch of the clock after the running step, if there is none yet."""
        s = self.setting
        if self._prepared is not None:
            return
        if len(self._queue) < s.groups_per_batch:
            self._throttle.reset()
            self._set_throttled(False)
            return
        clock = self._clock + bool(self._in_step)
        fresh = [v for v in self._queue if clock - v <= s.max_staleness]
        self.outcome.discarded += len(self._queue) - len(fresh)
        self.outcome.late_discarded += (len(self._queue) - len(fresh)) * self._late
        self._queue = fresh
        if len(fresh) < s.groups_per_batch:
            self._throttle.reset()
            self._set_throttled(False)
            return
        batch, mean = self._choose(clock)
        decision = self._throttle.decide(mean, self._now)
        self._set_throttled(decision == "wait")
        if decision == "wait":
            return
        self._throttle.reset()
        self.outcome.overrides += decision == "override"
        for version in batch:
            self._queue.remove(version)
        self._prepared = batch
        if not self._in_step:
            self._step()

    def _choose(self, clock: int) -> tuple[list[int], float]:
        """Oldest first, with as many of the freshest as the mean needs."""
        s = self.setting
        size = s.groups_per_batch
        if s.pacing != "adaptive":
            return self._queue[:size], mean_staleness(clock, self._queue[:size])
        by_age = sorted(self._queue)
        skip = len(by_age) - size
        total = size * clock - sum(by_age[:size])
        oldest = size
        while oldest > 0 and total > s.max_mean_staleness * size:
            oldest -= 1
            total += by_age[oldest] - by_age[skip + oldest]
        return by_age[:oldest] + by_age[skip + oldest :], total / size

    def _set_throttled(self, throttled: bool) -> None:
        if self._throttled_at is not None and not self._in_step:
            self._throttled_seconds += self._now - max(self._throttled_at, self._idle_since)
        self._throttled_at = self._now if throttled else None

    def _step(self) -> None:
        s, out = self.setting, self.outcome
        assert self._prepared is not None
        self._in_step, self._prepared = self._prepared, None
        ages = [self._clock - v for v in self._in_step]
        out.max_staleness_seen = max(out.max_staleness_seen, *ages)
        out.staleness_sum += sum(ages)
        wait = self._now - self._idle_since - self._throttled_seconds
        self._throttled_seconds = 0.0
        out.longest_gap_seconds = max(out.longest_gap_seconds, self._now - self._idle_since)
        self._at(s.step_seconds, lambda: self._end_step(wait))
        self._prepare()

    def _end_step(self, wait: float) -> None:
        s, out = self.setting, self.outcome
        out.steps += 1
        out.consumed += len(self._in_step)
        if self._late:
            out.late_consumed += len(self._in_step)
            out.late_busy_seconds += min(s.step_seconds, self._now - s.duration_seconds / 2)
        out.last_step_at = self._now
        self._in_step = []
        queued = sum(self._clock + 1 - v <= s.max_staleness for v in self._queue) + len(self._prepared or ())
        self._controller.observe_step(
            wait_seconds=wait,
            step_seconds=s.step_seconds,
            publish_lag_steps=self._clock - self._published,
            spare_batches=queued / s.groups_per_batch - 1 if s.measure_spare else None,
        )
        out.targets.append(self._controller.target)
        self._clock += 1
        if self._clock % s.snapshot_interval_steps == 0:
            self._num_snapshots += 1
            version = self._clock
            if self._num_snapshots % (s.refused_in_a_row + 1) == 0:
                self._at(s.publish_seconds, lambda: self._publish(version))
        self._idle_since = self._now
        if self._prepared is not None:
            self._step()
        else:
            self._prepare()

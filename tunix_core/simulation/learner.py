"""The learner: a queue of groups, batches that are chosen, steps that take their time, and what it tells the pool.

Everything that decides (capacity, target, throttle, order, bound) is `tunix_core.rl`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

import numpy as np

from tunix_core.rl.batching import choose_groups
from tunix_core.rl.pacing import TargetController, Throttle, admission_open, capacity_groups
from tunix_core.simulation.events import Events
from tunix_core.simulation.outcome import Outcome
from tunix_core.simulation.setting import Setting


class Learner:
    """Consumes what `deliver` brings.

    Args:
        stepped: called with the clock after each step.
        in_flight: groups in flight of the whole pool, for the record.
    """

    def __init__(
        self,
        setting: Setting,
        events: Events,
        outcome: Outcome,
        stepped: Callable[[int], None],
        in_flight: Callable[[], int],
    ) -> None:
        self._setting = setting
        self._events = events
        self._outcome = outcome
        self._stepped = stepped
        self._in_flight = in_flight
        self.clock = 0
        self.published = 0
        self._versions = np.zeros(0, np.int64)  # of the groups that wait, by arrival
        self._tokens = np.zeros(0)
        self._uses = np.zeros(0, np.int64)  # steps that trained on them before
        self._magnitudes = np.zeros(0)
        self._generator = np.random.default_rng([setting.seed, 2])
        self._queued: collections.Counter[int] = collections.Counter()
        """Version -> groups that wait."""
        self._arrived: list[tuple[np.ndarray, np.ndarray]] = []
        """… of which these are not in the arrays yet."""
        self._prepared: np.ndarray | None = None
        self._prepared_uses = np.zeros(0, np.int64)
        """How often its groups were used before."""
        self._reusable: tuple[np.ndarray, ...] = ()
        """Those of its groups that may come back, as `_waiting` gives them."""
        self._new_share = 1.0
        """Of the running step's groups: used for the first time."""
        self._in_step: np.ndarray | None = None
        self._idle_since = 0.0
        self._throttled_at: float | None = None
        self._throttled_seconds = 0.0
        self._controller = TargetController(max_staleness=setting.max_staleness)
        self._throttle = Throttle(
            max_mean_staleness=setting.max_mean_staleness, max_throttle_seconds=setting.max_throttle_seconds
        )

    # ---- what the pool may have in flight ----------------------------------------------------------

    def capacity(self) -> int:
        """Of the signal that is written now."""
        s = self._setting
        is_fixed = s.strategy == "fixed"
        if not is_fixed and not admission_open(
            max_staleness=s.bound, clock=self.clock, published_version=self.published
        ):
            return 0
        stepping = 0 if self._in_step is None else len(self._in_step)
        return capacity_groups(
            target=0 if s.strategy == "synchronous" else self._target,
            groups_per_batch=s.groups_per_batch,
            queued_fresh=self._num_ready(self.clock),
            in_step=0 if is_fixed and not s.count_step else stepping,
            throttled_batches=0 if is_fixed else int(self._throttled_at is not None),
        )

    @property
    def _target(self) -> int:
        return self._setting.target if self._setting.strategy == "fixed" else self._controller.target

    def _num_ready(self, clock: int) -> int:
        """Groups that the step at `clock` may consume, those chosen for it included."""
        return self._num_fresh(clock) + (0 if self._prepared is None else len(self._prepared))

    def _num_fresh(self, clock: int) -> int:
        return sum(count for version, count in self._queued.items() if clock - version <= self._setting.bound)

    # ---- batches -----------------------------------------------------------------------------------

    def deliver(self, versions: np.ndarray, tokens: np.ndarray) -> None:
        """The reader found shards."""
        self._arrived.append((versions, tokens))
        self._queued.update(versions.tolist())
        self.prepare()

    def prepare(self) -> None:
        """The batch of the clock after the running step, if there is none yet."""
        s = self._setting
        if self._prepared is not None or (self._in_step is not None and not s.prefetch):
            return
        clock = self.clock + (self._in_step is not None)
        if self._num_fresh(clock) < s.groups_per_batch:
            self._throttle.reset()
            self._set_throttled(False)
            return
        self._drop_stale(clock)
        chosen, mean = self._choose(clock, s.max_mean_staleness)
        decision = self._throttle.decide(mean, self._events.now)
        self._set_throttled(decision == "wait")
        if decision == "wait":
            return
        if chosen is None:
            chosen, _ = self._choose(clock, float("inf"))
        assert chosen is not None, "an override without a batch"
        self._throttle.reset()
        self._outcome.overrides += decision == "override"
        self._prepared = self._versions[chosen]
        self._outcome.consume(self._tokens[chosen[self._uses[chosen] == 0]], self._events.now)
        self._prepared_uses = self._uses[chosen]
        self._reusable = self._waiting(chosen[self._prepared_uses + 1 < s.max_reuse])
        self._keep(np.delete(np.arange(len(self._versions)), chosen))
        if self._in_step is None:
            self._step()

    def _drop_stale(self, clock: int) -> None:
        parts = [(self._versions, self._tokens), *self._arrived]
        self._arrived = []
        self._versions, self._tokens = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        num_new = len(self._versions) - len(self._uses)
        self._uses = np.concatenate([self._uses, np.zeros(num_new, np.int64)])
        self._magnitudes = np.concatenate([self._magnitudes, self._generator.random(num_new)])
        fresh = clock - self._versions <= self._setting.bound
        self._outcome.discard(self._tokens[~fresh & (self._uses == 0)], self._events.now)
        self._keep(np.flatnonzero(fresh))

    def _waiting(self, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(array[indices] for array in (self._versions, self._tokens, self._uses, self._magnitudes))

    def _take_back(self) -> None:
        """What the step that begins may leave to another one; the last to arrive."""
        versions, tokens, uses, magnitudes = self._reusable
        # In front of what has arrived and is not in the arrays yet.
        self._versions = np.concatenate([self._versions, versions])
        self._tokens = np.concatenate([self._tokens, tokens])
        self._uses = np.concatenate([self._uses, uses + 1])
        self._magnitudes = np.concatenate([self._magnitudes, magnitudes])
        self._queued.update(versions.tolist())

    def _keep(self, indices: np.ndarray) -> None:
        self._versions, self._tokens, self._uses, self._magnitudes = self._waiting(indices)
        values, counts = np.unique(self._versions, return_counts=True)
        self._queued = collections.Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    def _choose(self, clock: int, limit: float) -> tuple[np.ndarray | None, float]:
        s = self._setting
        if s.order == "first_in_first_out":  # a published rule, which the product does not have
            chosen = np.arange(s.groups_per_batch)
            return chosen, float((clock - self._versions[chosen]).mean())
        ones = np.ones(len(self._versions), np.int64)
        return choose_groups(
            self._versions,
            self._versions,
            ones,
            s.groups_per_batch,
            clock,
            order=s.order,
            max_mean_staleness=limit,
            num_uses=self._uses,
            magnitude=self._magnitudes,
        )

    def _set_throttled(self, throttled: bool) -> None:
        if self._throttled_at is not None and self._in_step is None:
            self._throttled_seconds += self._events.now - max(self._throttled_at, self._idle_since)
        self._throttled_at = self._events.now if throttled else None

    # ---- steps -------------------------------------------------------------------------------------

    def _step(self) -> None:
        assert self._prepared is not None, "a step without a batch"
        now = self._events.now
        self._in_step, self._prepared = self._prepared, None
        idle = now - self._idle_since
        waited = idle - self._throttled_seconds
        is_new = self._prepared_uses == 0
        self._new_share = float(is_new.mean())
        self._outcome.begin_step(self.clock - self._in_step, int(is_new.sum()), idle)
        self._take_back()
        self._throttled_seconds = 0.0
        self._events.after(self._setting.step_seconds, lambda: self._end_step(waited))
        self.prepare()

    def _end_step(self, waited: float) -> None:
        s, now = self._setting, self._events.now
        assert self._in_step is not None, "the end of no step"
        queued = self._num_ready(self.clock + 1)
        self._controller.observe_step(
            wait_seconds=waited,
            step_seconds=s.step_seconds,
            publish_lag_steps=self.clock - self.published,
            spare_batches=queued / s.groups_per_batch - 1 if s.measure_spare else None,
        )
        mean = float((self.clock - self._in_step).mean())
        self._outcome.end_step(now, s.step_seconds * self._new_share, mean, self._target, queued, self._in_flight())
        self._in_step = None
        self.clock += 1
        self._stepped(self.clock)
        self._idle_since = now
        if self._prepared is not None:
            self._step()
        else:
            self.prepare()

"""The actors: slots that play groups, shards that become readable, lives that end.

A group is in flight for its actor from its start until a pacing signal reports its shard read. Time goes
in ticks of the reader's poll: what ends or becomes readable within one is handled at its end, all actors
at once in arrays, so that a day of ten thousand of them takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tunix_core.rl.pacing import shares
from tunix_core.simulation.durations import Draw
from tunix_core.simulation.events import Events
from tunix_core.simulation.setting import Setting


class Delivery(NamedTuple):
    """M groups on their way to the reader."""

    at: np.ndarray  # float64 [M], when they become readable
    actor: np.ndarray  # int64 [M]
    life: np.ndarray  # int64 [M]
    version: np.ndarray  # int64 [M]
    tokens: np.ndarray  # float64 [M]


class Pool:
    """N actors of P slots.

    Args:
        draw: how long groups take.
        deliver: called with what became readable: policy versions [M], tokens [M].
    """

    def __init__(
        self,
        setting: Setting,
        events: Events,
        generator: np.random.Generator,
        draw: Draw,
        deliver: Callable[[np.ndarray, np.ndarray], None],
    ) -> None:
        self._setting = setting
        self._events = events
        self._generator = generator
        self._draw = draw
        self._deliver = deliver
        n, slots = setting.num_actors, (setting.num_actors, setting.groups_per_actor)
        self.order = np.arange(n)
        """Actors in rank order, as the learner sees them."""
        self.version = 0
        """Of the weights that new groups start with."""
        self.slowdown = 1.0
        self.lost = 0
        """Groups that were under way when their actor died."""
        self.in_flight = np.zeros(n, np.int64)
        self._signal_clock = 0
        self._share = np.zeros(n, np.int64)
        self._alive = np.ones(n, bool)
        self._life = np.zeros(n, np.int64)
        self._read = np.zeros(n, np.int64)
        """Groups of the present life that were read since the last signal was written."""
        self._running = np.zeros(n, np.int64)
        self._ends_at = np.full(slots, np.inf)
        self._versions = np.zeros(slots, np.int64)
        self._tokens = np.zeros(slots)
        self._first_end = np.inf
        none = np.zeros(0, np.int64)
        self._underway = Delivery(np.zeros(0), none, none, none, np.zeros(0))
        self._tick()

    # ---- what the learner tells --------------------------------------------------------------------

    def take_read(self) -> np.ndarray:
        """What a signal written now reports read, since the last one: [N]."""
        read, self._read = self._read, np.zeros_like(self._read)
        return read

    @property
    def lives(self) -> np.ndarray:
        return self._life.copy()

    def receive(self, clock: int, granted: np.ndarray, order: np.ndarray, read: np.ndarray, lives: np.ndarray) -> None:
        """A signal arrives.

        Args:
            granted: shares of the actors in `order`.
            read: [N] groups reported read, of the lives [N].
        """
        if self._setting.strategy == "synchronous":
            return  # a batch is handed out with its weights: see `publish`
        self._signal_clock = clock
        self._share[:] = 0
        self._share[order] = granted
        self.in_flight -= np.where(lives == self._life, read, 0)
        self._admit()

    def publish(self, version: int) -> None:
        """New weights arrive."""
        self.version = max(self.version, version)
        if self._setting.strategy == "synchronous":
            self.hand_out()
        elif self._setting.bound == 0:
            self._admit()  # the others did not wait for it

    def hand_out(self) -> None:
        """A synchronous loop's batch: exactly as many groups as it takes, over the actors that are known."""
        self._share[:] = 0
        self.in_flight[:] = 0
        if len(self.order):
            self._share[self.order] = shares(len(self.order), self._setting.groups_per_batch)
        self._admit()

    # ---- groups ------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Every actor starts what it may."""
        s = self._setting
        num = np.where(self._alive, s.groups_per_actor - self._running, 0)
        if s.strategy != "unpaced":
            if s.strategy != "synchronous" and s.bound == 0 and self.version != self._signal_clock:
                return  # the pool's weights are not those of the signal's clock
            num = np.minimum(num, self._share - self.in_flight)
        actors = np.flatnonzero(num > 0)
        if not len(actors):
            return
        num = num[actors]
        self._running[actors] += num
        self.in_flight[actors] += num
        free = np.isinf(self._ends_at[actors])
        row, slot = np.nonzero(free & (np.cumsum(free, 1) <= num[:, None]))
        at = (actors[row], slot)
        seconds, self._tokens[at] = self._draw(self._generator, len(row))
        self._versions[at] = self.version
        ends_at = self._events.now + seconds * self.slowdown
        self._ends_at[at] = ends_at
        self._first_end = min(self._first_end, float(ends_at.min()))

    def _tick(self) -> None:
        if self._first_end <= self._events.now:
            self._end(*np.nonzero(self._ends_at <= self._events.now))
        readable = self._underway.at <= self._events.now
        if readable.any():
            found = Delivery(*(values[readable] for values in self._underway))
            self._underway = Delivery(*(values[~readable] for values in self._underway))
            np.add.at(self._read, found.actor[found.life == self._life[found.actor]], 1)
            self._deliver(found.version, found.tokens)
        self._events.after(self._setting.reader_poll_seconds, self._tick)

    def _end(self, actor: np.ndarray, slot: np.ndarray) -> None:
        s, num, at = self._setting, len(actor), (actor, slot)
        delays = self._generator.random(num) * s.flush_seconds
        if s.store_seconds:
            delays += self._generator.exponential(s.store_seconds, num)
        ended = Delivery(self._ends_at[at] + delays, actor, self._life[actor], self._versions[at], self._tokens[at])
        self._underway = Delivery(*(np.concatenate(pair) for pair in zip(self._underway, ended, strict=True)))
        self._ends_at[at] = np.inf
        self._first_end = float(self._ends_at.min())
        np.subtract.at(self._running, actor, 1)
        self._admit()

    # ---- lives -------------------------------------------------------------------------------------

    @property
    def alive(self) -> np.ndarray:
        return np.flatnonzero(self._alive)

    def kill(self, actor: int) -> None:
        """What it has under way is lost; what it had delivered is read."""
        self._alive[actor] = False
        self.lost += int(self._running[actor])
        self._ends_at[actor] = np.inf

    def forget(self, actor: int) -> None:
        """The learner noticed: its rank is free."""
        self.order = self.order[self.order != actor]

    def revive(self, actor: int) -> None:
        """Another life announces itself."""
        self.order = np.append(self.order[self.order != actor], actor)
        self._alive[actor] = True
        self._life[actor] += 1
        for counts in (self.in_flight, self._running, self._read, self._share):
            counts[actor] = 0

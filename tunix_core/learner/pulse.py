"""Tells the others how the learner stands, on a timer of its own: while it steps, waits, compiles and recovers.

Writes `control/learner.json` (what actors pace themselves by) and the learner's heartbeat, flushes its
metrics, and looks for requests: to stop, and to trace a few steps. Were the signal written at steps only, a pool that waits for it
and a learner that waits for the pool would stop for good.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from tunix_core.config import RunConfig
from tunix_core.data.buffer import ReplayBuffer
from tunix_core.data.liveness import Liveness
from tunix_core.errors import StoreError
from tunix_core.learner.feeds import Feeds
from tunix_core.learner.observation import Observer
from tunix_core.rl.pacing import TargetController, admission_open, capacity_groups
from tunix_core.storage.control import LearnerSignal, StopRequest, read_stop, write_heartbeat, write_learner_signal
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.store import ObjectStore
from tunix_core.threads import Worker

HEARTBEAT_SECONDS = 1.0
FLUSH_SECONDS = 2.0
State = Literal["stepping", "waiting", "throttled", "finished"]


class Pulse:
    """The main thread sets `state` and `step_seconds`; everything else is read where it lives."""

    def __init__(
        self,
        store: ObjectStore,
        config: RunConfig,
        buffer: ReplayBuffer,
        feeds: Feeds,
        controller: TargetController,
        observer: Observer,
        *,
        process: str,
        incarnation: str,
        progress: Callable[[], dict[str, Any]],
        is_first: bool = True,
    ) -> None:
        """
        Args:
            is_first: of several hosts host 0, which speaks for all; the others tell it how their feeds stand.
        """
        self._store = store
        self._config = config
        self._buffer = buffer
        self._feeds = feeds
        self._is_first = is_first
        self._controller = controller
        self._observer = observer
        self._process = process
        self._incarnation = incarnation
        self._progress = progress
        self._policies = PolicyStore(store)
        self._liveness = Liveness(store)
        self.state: State = "waiting"
        self.step_seconds = 0.0
        self.num_groups_in_step = 0
        self.published_version = -1
        self.capacity_groups = 0
        self.live_incarnations: list[str] = []
        self.stop_request: StopRequest | None = None
        self.num_store_errors = 0
        self.worker = Worker("pulse", self._run)

    @property
    def num_fenced(self) -> int:
        return self._liveness.num_fenced

    def _run(self, stop: threading.Event) -> None:
        due_signal = due_beat = due_flush = 0.0
        interval = self._config.staleness.control_interval_seconds
        while not stop.is_set():
            now = time.monotonic()
            try:
                if now >= due_signal:
                    due_signal = now + interval
                    self.look_around()
                    if self._is_first:
                        self.publish()
                        self._observer.profiler.poll()
                if now >= due_beat:
                    due_beat = now + HEARTBEAT_SECONDS
                    self.beat()
                if now >= due_flush:
                    due_flush = now + FLUSH_SECONDS
                    self._observer.flush()
            except StoreError:
                self.num_store_errors += 1  # the next tick is the retry
            stop.wait(max(0.01, min(due_signal, due_beat) - time.monotonic()))

    def look_around(self) -> None:
        """Note a stop request, and how the feeds stand."""
        self.stop_request = read_stop(self._store)
        self._feeds.exchange()

    def publish(self) -> LearnerSignal:
        """Write the pacing signal."""
        current = self._policies.current()
        self.published_version = -1 if current is None else current.version
        cursors = self._feeds.live_cursors()
        self.live_incarnations = self._liveness.update({name: str(c["actor_id"]) for name, c in cursors.items()})
        with self._buffer.lock:
            clock, queued = self._buffer.clock, self._feeds.queued_groups()
        self.capacity_groups = self._capacity(clock, queued)
        signal = LearnerSignal(
            clock=clock,
            published_version=self.published_version,
            step_seconds=self.step_seconds,
            cursors={name: int(cursor["next_sequence"]) for name, cursor in cursors.items()},
            live_incarnations=self.live_incarnations,
            capacity_groups=self.capacity_groups,
            target=self._controller.target,
            state=self.state,
            learner_incarnation=self._incarnation,
            updated_at=time.time(),
        )
        write_learner_signal(self._store, signal)
        return signal

    def _capacity(self, clock: int, queued_fresh: int) -> int:
        bound = self._config.staleness.max_staleness
        if self.state == "finished" or not admission_open(
            max_staleness=bound, clock=clock, published_version=self.published_version
        ):
            return 0
        return capacity_groups(
            target=self._controller.target,
            groups_per_batch=self._config.learner.groups_per_batch,
            queued_fresh=queued_fresh,
            in_step=self.num_groups_in_step,
            throttled_batches=int(self.state == "throttled"),
        )

    def beat(self) -> None:
        """Write the heartbeat."""
        write_heartbeat(self._store, self._process, self._progress())

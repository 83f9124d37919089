"""What an actor reads and writes beside its decoding, on two threads of its own.

The polling thread follows the learner's pacing signal, the policy pointer (and loads new weights)
and the stop request, claims task blocks, and writes heartbeat and metrics. The delivery thread
commits shards in order. So the store's latency never holds up a dispatch.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tunix_core import paths
from tunix_core.actor.engines import WeightLoader
from tunix_core.actor.groups import Group
from tunix_core.config import RunConfig
from tunix_core.errors import ObjectMissing, StoreError
from tunix_core.rl.pacing import share
from tunix_core.storage.control import LearnerSignal, read_learner_signal, read_stop, write_heartbeat
from tunix_core.storage.leases import leased
from tunix_core.storage.metrics_files import MetricFiles
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.store import ObjectStore
from tunix_core.storage.task_blocks import TaskBlock, TaskBlocks
from tunix_core.storage.trajectory_writer import TrajectoryWriter
from tunix_core.threads import Worker

HEARTBEAT_SECONDS = 1.0
METRICS_SECONDS = 2.0
RETRY_SECONDS = 0.5
BLOCKS_AHEAD = 1
"""Claimed blocks kept ready, so that a claim never holds up an admission."""


@dataclasses.dataclass(frozen=True)
class Admission:
    """What the pacing signal allows this actor, and how far the learner has read its shards."""

    groups: int = 0
    """Groups it may have in flight."""
    cursor: int = 0
    """Shards below this sequence number are read."""
    clock: int = 0


def admission(signal: LearnerSignal | None, incarnation: str) -> Admission:
    """This actor's part of the signal; nothing while the learner does not list it."""
    if signal is None or incarnation not in signal.live_incarnations:
        return Admission(cursor=0 if signal is None else signal.cursors.get(incarnation, 0))
    live = signal.live_incarnations
    return Admission(
        groups=share(live.index(incarnation), len(live), signal.capacity_groups),
        cursor=signal.cursors.get(incarnation, 0),
        clock=signal.clock,
    )


class Poller:
    """The polling thread. Public fields are replaced whole, so the loop reads them without a lock."""

    def __init__(
        self,
        store: ObjectStore,
        config: RunConfig,
        loader: WeightLoader,
        *,
        process: str,
        incarnation: str,
        version: int,
        metrics: MetricFiles,
        progress: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.worker = Worker("poller", self._run)
        self._store = store
        self._config = config
        self._process = process
        self._incarnation = incarnation
        self._metrics = metrics
        self._progress = progress
        self._policies = PolicyStore(store)
        self._loader = loader
        self._tasks = TaskBlocks(
            store,
            incarnation=incarnation,
            epoch_size=config.environment.num_tasks,
            block_size=config.actor.task_block_size,
        )
        self._finished: queue.SimpleQueue[TaskBlock] = queue.SimpleQueue()
        self._loaded_version = version
        self.blocks: queue.SimpleQueue[TaskBlock] = queue.SimpleQueue()
        self._weights: tuple[Any, int] | None = None
        self._weights_lock = threading.Lock()
        self.admission = Admission()
        self.learner_state = "absent"
        self.stop_requested = False
        self.num_store_errors = 0

    def finish(self, block: TaskBlock) -> None:
        """Every group of the block is in a shard."""
        self._finished.put(block)

    @property
    def has_weights(self) -> bool:
        """Whether a newer version is loaded."""
        return self._weights is not None

    def take_weights(self) -> tuple[Any, int]:
        """The newest version loaded and not taken yet; older ones are skipped."""
        with self._weights_lock:
            assert self._weights is not None, "take_weights without has_weights"
            weights, self._weights = self._weights, None
        return weights

    def _run(self, stop: threading.Event) -> None:
        due_poll = due_beat = due_metrics = 0.0
        while not stop.is_set():
            now = time.monotonic()
            try:
                if now >= due_beat:
                    due_beat = now + HEARTBEAT_SECONDS
                    self.beat()
                if now >= due_poll:
                    due_poll = now + self._config.actor.poll_seconds
                    self._poll()
                if now >= due_metrics:
                    due_metrics = now + METRICS_SECONDS
                    self._metrics.flush()
            except StoreError:
                self.num_store_errors += 1  # the next tick is the retry
            stop.wait(max(0.01, min(due_poll, due_beat) - time.monotonic()))
        self.beat()
        self._metrics.flush()

    def beat(self) -> None:
        write_heartbeat(self._store, self._process, self._progress())

    def _poll(self) -> None:
        self.stop_requested = self.stop_requested or read_stop(self._store) is not None
        signal = read_learner_signal(self._store)
        self.admission = admission(signal, self._incarnation)
        self.learner_state = "absent" if signal is None else signal.state
        while not self._finished.empty():
            self._tasks.finish(self._finished.get())
        if self.blocks.qsize() < BLOCKS_AHEAD and self.admission.groups > 0:
            self.blocks.put(self._tasks.claim())
        current = self._policies.current()
        if current is not None and current.version > self._loaded_version:
            try:
                with leased(self._store, [paths.policy(current.version)], reader=self._process):
                    weights = self._loader.load(current.version)
            except ObjectMissing:
                return  # retired between pointer and read: the pointer has moved on
            with self._weights_lock:
                self._weights = (weights, current.version)
            self._loaded_version = current.version


class Delivery:
    """The delivery thread: commits shards of whole groups, in order, however long the store takes."""

    def __init__(self, writer: TrajectoryWriter) -> None:
        self.worker = Worker("delivery", self._run)
        self._writer = writer
        self._outbox: queue.SimpleQueue[list[Group]] = queue.SimpleQueue()
        self._unread: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._num_queued = 0
        self.delivered: queue.SimpleQueue[list[Group]] = queue.SimpleQueue()
        """Groups whose shard is committed, for the loop to settle."""
        self.num_shards = 0
        self.num_store_errors = 0

    def send(self, groups: list[Group]) -> None:
        """Queue one shard."""
        with self._lock:
            self._num_queued += len(groups)
        self._outbox.put(groups)

    def num_unread_groups(self, cursor: int) -> int:
        """Groups sent that the learner has not reported read.

        Args:
            cursor: shards below this sequence number are read.
        """
        with self._lock:
            self._unread = [(sequence, count) for sequence, count in self._unread if sequence >= cursor]
            return self._num_queued + sum(count for _, count in self._unread)

    def _run(self, stop: threading.Event) -> None:
        while True:
            try:
                groups = self._outbox.get(timeout=0.05)
            except queue.Empty:
                if stop.is_set():
                    break
                continue
            self._commit(groups)
        self._writer.close()

    def _commit(self, groups: list[Group]) -> None:
        rows = [trajectory for group in groups for trajectory in group.trajectories]
        while True:
            try:
                self._writer.write(rows)
                break
            except StoreError:
                self.num_store_errors += 1
                time.sleep(RETRY_SECONDS)
        with self._lock:
            self._num_queued -= len(groups)
            self._unread.append((self._writer.next_sequence - 1, len(groups)))
        self.num_shards += 1
        self.delivered.put(groups)

"""The two threads that feed the step: one reads shards, one prepares the next batch.

While the device executes the step at clock c, the batch of clock c + 1 is chosen by the staleness it
will have then, packed, put on the device, and its step record committed. At most one batch is
prepared ahead, so what is judged is always the clock at which the batch is really consumed.
"""

from __future__ import annotations

import dataclasses
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from tunix_core.config import RunConfig
from tunix_core.data.buffer import ReplayBuffer
from tunix_core.data.groups import Group
from tunix_core.data.ingestion import Ingestion
from tunix_core.data.packing import fit_groups
from tunix_core.errors import StoreError
from tunix_core.learner.batches import HostBatch, assemble, step_record
from tunix_core.learner.step_time import Preparation
from tunix_core.learner.trainer import Trainer
from tunix_core.rl.pacing import Throttle
from tunix_core.storage.step_records import write_step
from tunix_core.storage.store import ObjectStore
from tunix_core.threads import Worker, with_retries

INGEST_POLL_SECONDS = 0.05
PREPARE_POLL_SECONDS = 0.05


class IngestionThread:
    """Polls shards into the buffer until it is stopped; a failing store is waited for."""

    def __init__(self, ingestion: Ingestion) -> None:
        self._ingestion = ingestion
        self.arrived = threading.Event()
        """Set whenever something new is in the buffer."""
        self.num_store_errors = 0
        self.worker = Worker("ingestion", self._run)

    def _run(self, stop: threading.Event) -> None:
        pause = INGEST_POLL_SECONDS
        while not stop.is_set():
            try:
                num_shards = self._ingestion.poll()
                pause = INGEST_POLL_SECONDS
            except StoreError:
                self.num_store_errors += 1
                num_shards, pause = 0, min(2 * pause, 5.0)
            if num_shards:
                self.arrived.set()
            stop.wait(pause)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A committed batch on the device."""

    host: HostBatch
    device: Any
    override: bool
    """It was stepped on although its mean staleness is over the limit."""
    made: Preparation
    """When it was chosen, packed, put on the device, committed."""
    num_deferred_groups: int
    """Put back because the largest compiled window count did not hold them."""


class Preparer:
    """Makes the batch of a given clock as soon as there is one."""

    def __init__(
        self,
        store: ObjectStore,
        config: RunConfig,
        buffer: ReplayBuffer,
        trainer: Trainer,
        counts: Sequence[int],
        *,
        incarnation: str,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._config = config
        self._buffer = buffer
        self._trainer = trainer
        self._counts = counts
        self._incarnation = incarnation
        self._monotonic = monotonic
        self._throttle = Throttle(
            max_mean_staleness=config.staleness.max_mean_staleness,
            max_throttle_seconds=config.staleness.max_throttle_seconds,
        )
        self.state: Literal["waiting", "throttled"] = "waiting"
        """What is missing while there is no batch: groups, or fresher ones."""

    def attempt(self, clock: int, stop: threading.Event) -> Prepared | None:
        """One try at the batch that is consumed at `clock`; None where there is none yet.

        Raises:
            Fenced: another learner has committed this step.
        """
        started = self._monotonic()
        groups, override = self._choose(clock, started)
        if groups is None:
            return None
        learner = self._config.learner
        num_fitting = fit_groups([g.rows.lengths for g in groups], learner.window_tokens, self._counts[-1])
        self._buffer.put_back(groups[num_fitting:])
        host = assemble(groups[:num_fitting], clock, self._counts, self._config)
        packed = self._monotonic()
        device = jax.block_until_ready(self._trainer.put(host.arrays))
        placed = self._monotonic()
        record = step_record(host, incarnation=self._incarnation, seed=self._config.seed, override=override)
        with_retries(lambda: write_step(self._store, clock + 1, record), stop)
        return Prepared(
            host=host,
            device=device,
            override=override,
            made=Preparation(started, packed, placed, self._monotonic()),
            num_deferred_groups=len(groups) - num_fitting,
        )

    def _choose(self, clock: int, now: float) -> tuple[list[Group] | None, bool]:
        num_groups = self._config.learner.groups_per_batch
        limit = self._config.staleness.max_mean_staleness
        taken = self._buffer.take(num_groups, clock, max_mean_staleness=limit)
        if taken.groups is not None:
            self._throttle.reset()
            return taken.groups, False
        if taken.num_fresh < num_groups:
            self._throttle.reset()
            self.state = "waiting"
            return None, False
        self.state = "throttled"
        if self._throttle.decide(taken.mean_staleness, now) == "wait":
            return None, False
        self._throttle.reset()
        return self._buffer.take(num_groups, clock, max_mean_staleness=math.inf).groups, True


class PreparationThread:
    """`request` a clock, then take its batch with `next`."""

    def __init__(self, preparer: Preparer, arrived: threading.Event) -> None:
        self._preparer = preparer
        self._arrived = arrived
        self._requests: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Prepared] = queue.SimpleQueue()
        self.worker = Worker("preparation", self._run)

    @property
    def state(self) -> Literal["waiting", "throttled"]:
        return self._preparer.state

    def request(self, clock: int) -> None:
        """Prepare the batch that is consumed at `clock`; to be called when the step before it is dispatched."""
        self._requests.put(clock)

    def next(self, timeout_seconds: float) -> Prepared | None:
        """The batch requested, None if it is not ready in time. Raises what its preparation raised."""
        try:
            return self._ready.get(timeout=timeout_seconds)
        except queue.Empty:
            self.worker.check()
            return None

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                clock = self._requests.get(timeout=PREPARE_POLL_SECONDS)
            except queue.Empty:
                continue
            prepared = None
            while prepared is None and not stop.is_set():
                self._arrived.clear()
                prepared = self._preparer.attempt(clock, stop)
                if prepared is None:
                    self._arrived.wait(PREPARE_POLL_SECONDS)
            if prepared is not None:
                self._ready.put(prepared)

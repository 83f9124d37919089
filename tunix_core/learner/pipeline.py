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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from tunix_core.config import RunConfig
from tunix_core.data.buffer import ReplayBuffer
from tunix_core.data.groups import Group
from tunix_core.data.ingestion import Ingestion
from tunix_core.data.packing import Layout, WindowSize, fit_groups, size_for
from tunix_core.data.rows import RowFetcher
from tunix_core.distributed.hosts import ALONE, Hosts, Share
from tunix_core.errors import StoreError
from tunix_core.learner.batches import (
    Figures,
    HostBatch,
    build,
    group_of_record,
    joined_statistics,
    lay_out,
    longest,
    padded,
    record_part,
    share_of_one,
    step_record,
)
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
    """Put back, over all feeds, because the largest compiled window count did not hold them."""


class Preparer:
    """Makes the batch of a given clock as soon as there is one.

    In three agreements with the other hosts: whether to step, on how many windows, and that it is committed. Host 0
    decides and writes the record; each feed chooses and packs its own groups.
    """

    def __init__(
        self,
        store: ObjectStore,
        config: RunConfig,
        buffer: ReplayBuffer,
        trainer: Trainer,
        sizes: Sequence[WindowSize],
        *,
        incarnation: str,
        hosts: Hosts = ALONE,
        share: Share | None = None,
        stop_asked: Callable[[], bool] = lambda: False,
        snapshot_wanted: Callable[[], bool] = lambda: False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            stop_asked: this host was asked to end; then all end behind the same step.
            snapshot_wanted: the learner waits with newer weights than its last snapshot; host 0's counts.
        """
        self._store = store
        self._config = config
        self._buffer = buffer
        self._trainer = trainer
        self._sizes = sizes
        self._incarnation = incarnation
        self._hosts = hosts
        self._share = share or share_of_one(config)
        self._stop_asked = stop_asked
        self._snapshot_wanted = snapshot_wanted
        self._monotonic = monotonic
        self._fetch = RowFetcher(store)
        self._throttle = Throttle(
            max_mean_staleness=config.staleness.max_mean_staleness,
            max_throttle_seconds=config.staleness.max_throttle_seconds,
        )
        self.state: Literal["waiting", "throttled"] = "waiting"
        """What is missing while there is no batch: groups, or fresher ones."""
        self.stopped = False
        """The hosts have agreed to end before this batch."""
        self.snapshot_clock = -1
        """They have agreed to write a snapshot at this clock, although none is due."""

    def attempt(self, clock: int, stop: threading.Event) -> Prepared | None:
        """One try at the batch that is consumed at `clock`; None where there is none yet.

        Raises:
            Fenced: another learner has committed this step.
            PeerLost: another host is gone.
        """
        started = self._monotonic()
        groups, override, size = self._choose(clock, started)
        if groups is None:
            return None
        host, parts, num_deferred = self._packed(groups, clock, size)
        packed = self._monotonic()
        device = jax.block_until_ready(self._trainer.put(host.arrays))
        placed = self._monotonic()
        host = self._committed(host, parts, override, stop)
        return Prepared(
            host=host,
            device=device,
            override=override,
            made=Preparation(started, packed, placed, self._monotonic()),
            num_deferred_groups=num_deferred,
        )

    # ---- whether to step --------------------------------------------------------------------------

    def _choose(self, clock: int, now: float) -> tuple[list[Group] | None, bool, WindowSize]:
        """This feed's groups of an agreed batch (none on a host that does not lead its feed); whether it is an override; the
        windows that all hosts' groups fit."""
        groups, status = self._candidate(clock) if self._share.leads else ([], None)
        answer = self._hosts.lead(
            "prepare",
            {"status": status, "stop": self._stop_asked(), "snapshot": self._snapshot_wanted()},
            lambda payloads: self._decide(payloads, now),
        )
        if self._share.leads and self._share.num_feeds > 1:
            self._buffer.settle(answer["news"])
        if answer["snapshot"]:
            self.snapshot_clock = clock
        action, size = answer["action"], size_for(self._sizes, answer["longest"])
        if action in ("step", "override"):
            return groups, action == "override", size
        self._buffer.put_back(groups or ())
        self.stopped = action == "stop"
        self.state = "throttled" if action == "throttled" else "waiting"
        return None, False, size

    def _candidate(self, clock: int) -> tuple[list[Group] | None, dict[str, Any]]:
        """Reserved: within the limit of mean staleness where that can be, else what an override would step on."""
        num_groups = self._config.learner.groups_per_batch // self._share.num_feeds
        taken = self._buffer.take(num_groups, clock, max_mean_staleness=self._config.staleness.max_mean_staleness)
        groups, within = taken.groups, taken.groups is not None
        if not within and taken.num_fresh >= num_groups:
            groups = self._buffer.take(num_groups, clock, max_mean_staleness=math.inf).groups
        news = self._buffer.announce() if self._share.num_feeds > 1 else []
        return groups, {
            "feed": self._share.feed,
            "enough": groups is not None,
            "within": within,
            "mean_staleness": taken.mean_staleness,
            "longest": longest(groups or ()),
            "news": news,
        }

    def _decide(self, payloads: Sequence[Mapping[str, Any]], now: float) -> dict[str, Any]:
        """On host 0. A batch whose parts are all within the limit is so as a whole."""
        feeds = sorted((p["status"] for p in payloads if p["status"] is not None), key=lambda status: status["feed"])
        if any(payload["stop"] for payload in payloads):
            action = "stop"
        elif not all(status["enough"] for status in feeds):
            self._throttle.reset()
            action = "waiting"
        elif all(status["within"] for status in feeds):
            self._throttle.reset()
            action = "step"
        else:
            worst = max(status["mean_staleness"] for status in feeds)
            action = {"wait": "throttled"}.get(found := self._throttle.decide(worst, now), found)
            if action == "override":
                self._throttle.reset()
        return {
            "action": action,
            "longest": max(status["longest"] for status in feeds),
            "news": [status["news"] for status in feeds],
            "snapshot": payloads[0]["snapshot"] and action in ("waiting", "throttled"),
        }

    # ---- what is stepped on -----------------------------------------------------------------------

    def _packed(self, groups: list[Group], clock: int, size: WindowSize) -> tuple[HostBatch, list[dict[str, Any]], int]:
        """This host's windows, (on host 0) the parts of all feeds for the record, and how many groups they put back."""
        share, part = self._share, None
        if share.leads:
            num_fitting = fit_groups([g.rows.lengths for g in groups], size.tokens, share.num_own(size.counts[-1]))
            groups, deferred = groups[:num_fitting], groups[num_fitting:]
            self._buffer.put_back(deferred)
            layout = lay_out(groups, size.tokens, share)
            part = {"feed": share.feed, "num_deferred": len(deferred), **record_part(groups, layout, self._config)}
        parts: list[dict[str, Any]] = []

        def join(payloads: list[Any]) -> dict[str, Any]:
            parts.extend(sorted((p for p in payloads if p is not None), key=lambda p: p["feed"]))
            num_windows = padded(max(p["num_windows"] for p in parts), size.counts)
            return {
                "num_windows": num_windows,
                "num_deferred": sum(p["num_deferred"] for p in parts),
                "statistics": joined_statistics(parts),
                "parts": parts if None in payloads else None,
            }

        answer = self._hosts.lead("prepare", part, join)
        if not share.leads:
            own = answer["parts"][share.feed]
            groups = [group_of_record(entry, self._fetch) for entry in own["groups"]]
            layout = Layout(np.array(own["window"], np.int32), np.array(own["start"], np.int32), own["num_windows"])
        statistics = None if answer["statistics"] is None else tuple(answer["statistics"])
        shape = answer["num_windows"], size.tokens
        batch = build(groups, clock, layout, shape, self._config, share, statistics)
        return batch, parts, answer["num_deferred"]

    def _committed(
        self, host: HostBatch, parts: list[dict[str, Any]], override: bool, stop: threading.Event
    ) -> HostBatch:
        """With its step record written, and the figures of the whole batch."""

        def commit(payloads: list[Any]) -> list[Any]:
            figures = [own for _, own in sorted((p for p in payloads if p is not None), key=lambda p: p[0])]
            record = step_record(
                parts,
                Figures.total(figures),
                clock=host.clock,
                shape=host.shape,
                incarnation=self._incarnation,
                config=self._config,
                override=override,
            )
            with_retries(lambda: write_step(self._store, host.clock + 1, record), stop)
            return figures

        own = (self._share.feed, host.figures.to_json()) if self._share.leads else None
        return host.completed(self._hosts.lead("prepare", own, commit))


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

    @property
    def stopped(self) -> bool:
        """The hosts have agreed to end: no batch will come."""
        return self._preparer.stopped

    @property
    def snapshot_clock(self) -> int:
        """See `Preparer`; known on every host before the batch of that clock is."""
        return self._preparer.snapshot_clock

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
            while prepared is None and not stop.is_set() and not self._preparer.stopped:
                self._arrived.clear()
                prepared = self._preparer.attempt(clock, stop)
                if prepared is None:
                    self._arrived.wait(PREPARE_POLL_SECONDS)
            if prepared is not None:
                self._ready.put(prepared)

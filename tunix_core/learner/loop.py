"""The learner's life: restore, warm up, replay, then one step after another until the run is over.

Threads: this one dispatches steps; `ingestion` reads shards into the buffer; `preparation` makes the
next batch; `pulse` publishes the pacing signal and the heartbeat; two more write snapshots and
checkpoints. The order that matters: a step's record is committed before the step is dispatched; the
clock advances when the device has finished; the host copies for snapshot and checkpoint are taken
before the next dispatch gives the arrays away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunix_core.config import RunConfig
from tunix_core.data.buffer import GroupAdvantages, ReplayBuffer
from tunix_core.data.groups import Group
from tunix_core.data.ingestion import Ingestion
from tunix_core.data.packing import window_sizes
from tunix_core.data.sharing import ownership
from tunix_core.distributed.hosts import ALONE, Hosts, Share
from tunix_core.errors import ConfigError, Diverged, Interrupted
from tunix_core.learner import checkpointing, recovery
from tunix_core.learner.batches import HostBatch, share_of_one
from tunix_core.learner.feeds import Feeds
from tunix_core.learner.observation import Observer
from tunix_core.learner.pipeline import IngestionThread, PreparationThread, Prepared, Preparer
from tunix_core.learner.pulse import Pulse
from tunix_core.learner.reporting import batch_flops
from tunix_core.learner.step_time import StepTimes
from tunix_core.learner.totals import BusyMeter, Totals
from tunix_core.learner.trainer import Trainer
from tunix_core.rl.pacing import TargetController
from tunix_core.storage.control import read_stop, request_stop
from tunix_core.storage.parts import Tensors
from tunix_core.storage.snapshots import SnapshotStore
from tunix_core.storage.step_records import read_steps
from tunix_core.storage.store import ObjectStore
from tunix_core.threads import LatestJob, Worker, with_retries

_WAIT_SECONDS = 0.1
_SNAPSHOT_WHILE_WAITING_SECONDS = 1.0
_MIN_BATCHES_IN_BUFFER = 2
_READ_THE_REST_SECONDS = 5.0


class Learner:
    """One life of the learner. `run` returns when the run is over and raises what ends it early."""

    def __init__(
        self,
        store: ObjectStore,
        config: RunConfig,
        trainer: Trainer,
        group_advantages: GroupAdvantages,
        *,
        policy_zero: Tensors,
        reference: Tensors,
        incarnation: str,
        process: str = "learner",
        hosts: Hosts = ALONE,
        share: Share | None = None,
        interrupted: Callable[[], bool] = lambda: False,
        log: Callable[[str], None] = print,
    ) -> None:
        """
        Args:
            policy_zero: weights that training starts from, by name.
            reference: weights of the KL reference, by name.
            incarnation: names this life in step records and file names; the same on all hosts.
            hosts: the processes of this learner.
            share: of several hosts, this one's of every batch.
            interrupted: True once the process was asked to end by a signal.
        """
        check_buffer_bytes(config)
        self._hosts = hosts
        self._share = share or share_of_one(config)
        check_feeds(config, self._share)
        self._store = store
        self._config = config
        self._trainer = trainer
        self._policy_zero = policy_zero
        self._incarnation = incarnation
        self._process = process
        self._interrupted = interrupted
        self._log = log
        self._sizes = window_sizes(config)
        self._buffer = ReplayBuffer(
            group_advantages=group_advantages,
            window_tokens=config.learner.window_tokens,
            max_staleness=config.staleness.max_staleness,
            buffer_bytes=config.learner.buffer_bytes,
            order=config.staleness.consumption_order,
            max_reuse=config.staleness.max_reuse,
            filter_zero_signal=config.algorithm.filter_zero_signal_groups,
            feed=self._share.feed,
            num_feeds=self._share.num_feeds,
        )
        self._feeds = Feeds(self._buffer, hosts, self._share)
        self._reference = trainer.reference(reference)
        self._state: Any = None
        self._totals = Totals()
        self._busy = BusyMeter(self._totals)
        self._controller = TargetController(max_staleness=config.staleness.max_staleness)
        self._observer = Observer(
            store,
            config,
            self._feeds.ledger,
            process=process,
            incarnation=incarnation,
            log=log,
            is_first=hosts.is_first,
        )
        self._snapshots = LatestJob("snapshots", keep_all=not hosts.alone)
        self._checkpoints = LatestJob("checkpoints", keep_all=not hosts.alone)
        self._snapshot_clock = 0
        self._snapshot_wanted = False
        self._checkpoint_clock = -1
        """Of the last one submitted, as all hosts know in their main threads; `_written_clock` is the writer's."""
        self._written_clock = -1
        self._ingestion: IngestionThread | None = None
        self._preparation: PreparationThread | None = None
        self._pulse = Pulse(
            store,
            config,
            self._buffer,
            self._feeds,
            self._controller,
            self._observer,
            process=process,
            incarnation=incarnation,
            progress=self.progress,
            is_first=hosts.is_first,
        )

    @property
    def clock(self) -> int:
        """Completed steps."""
        return self._buffer.clock

    @property
    def state(self) -> Any:
        """The trainer's."""
        return self._state

    # ---- life -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to `learner.num_steps`, or until a stop request.

        Raises:
            Interrupted: asked to end by a signal; everything is flushed.
            Fenced: another learner has taken over.
            Diverged: too many non-finite updates in a row.
            PeerLost: another host is gone.
        """
        restored = recovery.restore(
            self._store, self._trainer, self._buffer, self._policy_zero, self._hosts, self._share
        )
        self._state = restored.state
        if restored.totals:
            self._totals = Totals.restore(restored.totals["totals"])
            self._busy = BusyMeter(self._totals)
            self._controller.restore(restored.totals["pacing"])
        for reason in restored.refused:
            self._log(f"passed over {reason}")
        self._snapshot_clock = self.clock
        self._checkpoint_clock = -1 if restored.checkpoint_clock is None else restored.checkpoint_clock
        self._written_clock = self._checkpoint_clock
        self._pulse.worker.start()
        try:
            try:
                if self.clock < self._config.learner.num_steps and not read_steps(self._store, self.clock):
                    self._start_ingestion()  # while it compiles: the pool is known, and fills the buffer
                self._warm_up()
                self._replay()
                if self.clock < self._config.learner.num_steps:
                    self._start_ingestion()
                    self._start_preparation()
                    self._train()
            except BaseException:
                self._hosts.abandon()  # else the threads below would be waited for in vain
                raise
            finally:
                self._stop_feeding()
            self._finish()
        finally:
            self._pulse.worker.stop()
            self._snapshots.abandon()
            self._checkpoints.abandon()
            self._observer.close()

    def _warm_up(self) -> None:
        started = time.monotonic()
        for size in self._sizes:
            self._trainer.compile(size.counts[-1], size.tokens)
        self._observer.warmed_up()
        shapes = ", ".join(f"{size.counts[-1]} windows of {size.tokens} tokens" for size in self._sizes)
        self._log(f"compiled for up to {shapes} in {time.monotonic() - started:.1f} s")

    def _replay(self) -> None:
        first = self.clock
        for clock in recovery.replay(
            self._store, self._buffer, self._config, self._execute_again, self._hosts, self._share
        ):
            self._snapshot_if_due(clock)
        if self.clock > first:
            self._totals.num_replayed_steps += self.clock - first
            self._log(f"replayed steps {first + 1} to {self.clock}")
        if self._checkpoint_clock >= 0 or self.clock > 0:
            self._totals.num_recoveries += 1

    def _start_ingestion(self) -> None:
        """Only behind the last step record: rows of a step to be replayed must not be judged by an older clock."""
        if self._ingestion is None and self._share.leads:
            ingestion = self._make_ingestion()
            self._ingestion = IngestionThread(ingestion)
            self._ingestion.worker.start()

    def _make_ingestion(self) -> Ingestion:
        return Ingestion(
            self._store,
            self._buffer,
            vocab_size=self._config.model.vocab_size,
            with_turns=self._config.algorithm.reads_turns,
            owns=ownership(self._share.feed, self._share.num_feeds),
        )

    def _start_preparation(self) -> None:
        preparer = Preparer(
            self._store,
            self._config,
            self._buffer,
            self._trainer,
            self._sizes,
            incarnation=self._incarnation,
            hosts=self._hosts,
            share=self._share,
            stop_asked=lambda: not self._hosts.alone and self._stop_asked(),
            snapshot_wanted=lambda: self._snapshot_wanted,
        )
        arrived = threading.Event() if self._ingestion is None else self._ingestion.arrived
        self._preparation = PreparationThread(preparer, arrived)
        self._preparation.worker.start()

    def _stop_feeding(self) -> None:
        for thread in (self._preparation, self._ingestion):
            if thread is not None:
                thread.worker.stop()

    def _train(self) -> None:
        assert self._preparation is not None
        self._preparation.request(self.clock)
        self._observer.timer.start()
        while self.clock < self._config.learner.num_steps:
            prepared = self._await_batch()
            if prepared is None:
                return
            self._step(prepared)

    def _await_batch(self) -> Prepared | None:
        """The next batch; None once the run is to end."""
        assert self._preparation is not None
        timer, waited = self._observer.timer, 0.0
        timer.wait_begins()
        while True:
            self._check_threads()
            if self._preparation.stopped or (self._hosts.alone and self._stop_asked()):
                return None
            prepared = self._preparation.next(_WAIT_SECONDS)
            waited += timer.lap("throttled" if self._pulse.state == "throttled" else "wait_for_data")
            # Newer weights are what the pool may be waiting for. Hosts write them at the same clock, or not at all.
            behind = waited > _SNAPSHOT_WHILE_WAITING_SECONDS and self._snapshot_clock < self.clock
            self._snapshot_wanted = behind and prepared is None
            agreed = self._preparation.snapshot_clock == self.clock if not self._hosts.alone else self._snapshot_wanted
            if agreed and self._snapshot_clock < self.clock:
                self._snapshot()
            if prepared is not None:
                timer.received(prepared.made)
                return prepared
            self._pulse.state = self._preparation.state
            self._busy.tick()

    def _stop_asked(self) -> bool:
        return self._interrupted() or self._pulse.stop_request is not None

    def _check_threads(self) -> None:
        workers: list[Worker | LatestJob] = [self._pulse.worker, self._snapshots, self._checkpoints]
        workers += [thread.worker for thread in (self._ingestion, self._preparation) if thread is not None]
        for worker in workers:
            worker.check()

    # ---- steps ----------------------------------------------------------------------------------

    def _step(self, prepared: Prepared) -> None:
        assert self._preparation is not None
        host, observer = prepared.host, self._observer
        assert host.clock == self.clock, "a batch is consumed at the clock it was prepared for"
        if self._share.leads:
            self._buffer.consume(host.groups, self.clock)
        self._pulse.num_groups_in_step = host.figures.num_groups
        self._pulse.state = "stepping"
        self._busy.dispatched()
        observer.profiler.step_begins(self.clock)
        observer.timer.lap("other")
        self._state, metrics = self._trainer.step(self._state, self._reference, prepared.device, host.denominator)
        if self.clock + 1 < self._config.learner.num_steps:
            self._preparation.request(self.clock + 1)  # it runs while the device works
        values = {name: float(value) for name, value in metrics.items()}  # blocks until the device is done
        device_seconds = observer.timer.lap("device")
        observer.profiler.step_ended()
        model_flops = batch_flops(host, self._config.model)["model_flops"]
        new = _first_use_share(host.groups)
        self._busy.completed(new * device_seconds, round(new * host.num_tokens), new * model_flops)
        self._totals.num_overrides += prepared.override
        self._totals.num_deferred_groups += prepared.num_deferred_groups
        self._totals.count_batch(host.figures.staleness, self._config.staleness.max_staleness)
        self._pulse.num_groups_in_step = 0
        self._buffer.advance(self.clock + 1)
        times = observer.step_times()
        self._count_times(times)
        queued = self._feeds.queued_groups()
        self._controller.observe_step(
            wait_seconds=times.standstill_seconds,
            step_seconds=device_seconds,
            publish_lag_steps=host.clock - max(0, self._pulse.published_version),
            spare_batches=queued / self._config.learner.groups_per_batch - 1,
        )
        self._record(
            host,
            values,
            **times.columns(),
            prepare_seconds=prepared.made.committed - prepared.made.chosen,
            throttle_override=int(prepared.override),
            replayed=0,
        )
        self._snapshot_if_due(self.clock)
        self._checkpoint_if_due()
        self._guard(values)

    def _execute_again(self, host: HostBatch, record: Mapping[str, Any]) -> None:
        """A step record after the checkpoint: the same step, its device time not counted as busy."""
        started = time.monotonic()
        device = self._trainer.put(host.arrays)
        self._state, metrics = self._trainer.step(self._state, self._reference, device, host.denominator)
        values = {name: float(value) for name, value in metrics.items()}
        self._totals.num_overrides += int(record["throttle_override"])
        self._totals.count_batch(host.figures.staleness, self._config.staleness.max_staleness)
        self._record(
            host,
            values,
            device_seconds=time.monotonic() - started,
            throttle_override=int(record["throttle_override"]),
            replayed=1,
            clock=host.clock + 1,
        )
        self._guard(values)

    def _count_times(self, times: StepTimes) -> None:
        self._totals.wait_seconds += times.wait_for_data_seconds
        self._totals.throttled_seconds += times.throttled_seconds
        previous = self._pulse.step_seconds  # the first one of a life waited for the pool to start
        self._pulse.step_seconds = 0.8 * previous + 0.2 * times.wall_seconds if previous else times.device_seconds

    def _guard(self, values: Mapping[str, float]) -> None:
        skipped = bool(values.get("nonfinite", 0.0))
        self._totals.num_nonfinite_steps += skipped
        self._totals.nonfinite_in_a_row = self._totals.nonfinite_in_a_row + 1 if skipped else 0
        limit = self._config.learner.max_nonfinite_steps
        if self._totals.nonfinite_in_a_row >= limit:
            raise Diverged(
                f"updates: received {limit} non-finite ones in a row, accepted fewer than "
                f"learner.max_nonfinite_steps = {limit}. Lower optimizer.learning_rate, or look at the last batches."
            )

    # ---- what is written ------------------------------------------------------------------------

    def _snapshot_if_due(self, clock: int) -> None:
        if clock % self._config.learner.snapshot_interval_steps == 0:
            self._snapshot(clock)

    def _snapshot(self, clock: int | None = None) -> None:
        version = self.clock if clock is None else clock
        tensors = self._trainer.tensors(self._state)
        self._snapshot_clock = version
        store, incarnation = SnapshotStore(self._store), self._incarnation

        def complete(parts: list[dict[str, Any]]) -> None:
            with_retries(lambda: store.complete(version, parts, incarnation=incarnation), threading.Event())

        def write() -> None:
            part = store.write_part(version, tensors, incarnation=incarnation, host=self._hosts.index)
            self._hosts.lead("snapshots", part, complete)

        self._snapshots.submit(write)

    def _checkpoint_if_due(self) -> None:
        at_the_end = self.clock >= self._config.learner.num_steps  # `_finish` writes that one
        if self.clock % self._config.checkpoint.interval_steps == 0 and not at_the_end:
            self._checkpoint()

    def _checkpoint(self) -> None:
        buffer, seen = self._buffer.state()
        checkpoint = checkpointing.Checkpoint(
            clock=buffer["clock"],
            state=self._trainer.to_host(self._state),
            buffer=buffer if self._share.leads else None,
            seen=seen,
            totals={"totals": self._totals.state(), "pacing": self._controller.state()},
        )
        self._checkpoint_clock = checkpoint.clock

        def write() -> None:
            checkpointing.save(
                self._store, checkpoint, incarnation=self._incarnation, hosts=self._hosts, feed=self._share.feed
            )
            self._written_clock = checkpoint.clock

        self._checkpoints.submit(write)

    def _finish(self) -> None:
        """Flush everything, and close the run if all its steps are done."""
        done = self.clock >= self._config.learner.num_steps
        self._pulse.num_groups_in_step = 0
        if done and self._checkpoint_clock < self.clock and self._share.leads:
            self._read_the_rest()
        if done:
            self._buffer.finish()
            self._pulse.state = "finished"
        if self._snapshot_clock < self.clock or done:
            self._snapshot()
        if self._checkpoint_clock < self.clock:
            self._checkpoint()
        self._snapshots.finish()
        self._checkpoints.finish()
        self._pulse.worker.stop()
        self._feeds.exchange()
        self._hosts.gather("end", None)  # now all have put up what they end with
        self._pulse.look_around()
        if self._hosts.is_first:
            self._observer.record_end(self.clock)
            self._observer.flush()
            self._pulse.publish()
        self._observer.close()
        self._pulse.beat()
        if done and self._hosts.is_first:
            request_stop(self._store, reason="completed", source=self._process, failed=False)
        if done:
            return
        if read_stop(self._store) is None:
            raise Interrupted(f"learner: interrupted at clock {self.clock}; the next attempt goes on from there")

    def _read_the_rest(self) -> None:
        """What is there when the last step is done belongs into the ledger; what comes later was never read."""
        ingestion = self._make_ingestion()
        deadline = time.monotonic() + _READ_THE_REST_SECONDS
        while ingestion.poll() and time.monotonic() < deadline:
            pass

    def _record(self, host: HostBatch, values: Mapping[str, float], **columns: Any) -> None:
        self._observer.record(
            host,
            values,
            self._busy,
            clock=columns.pop("clock", self.clock),
            step_seconds=self._pulse.step_seconds,
            target=self._controller.target,
            capacity_groups=self._pulse.capacity_groups,
            queued_groups=self._feeds.waiting_groups(),
            published_version=self._pulse.published_version,
            **columns,
        )

    def progress(self) -> dict[str, Any]:
        """The heartbeat: what a person, the live view and the log line show."""
        ledger = self._feeds.ledger()
        return {
            "incarnation": self._incarnation,
            "clock": self.clock,
            "num_steps": self._config.learner.num_steps,
            "state": self._pulse.state,
            **self._observer.figures(self._busy),
            "step_seconds": self._pulse.step_seconds,
            "wait_for_data_seconds": self._totals.wait_seconds,
            "snapshot_version": self._snapshot_clock,
            "checkpoint_clock": self._written_clock,
            "published_version": self._pulse.published_version,
            "target": self._controller.target,
            "capacity_groups": self._pulse.capacity_groups,
            "num_live_actors": len(self._pulse.live_incarnations),
            "num_fenced": self._pulse.num_fenced,
            "num_buffered_groups": self._feeds.waiting_groups(),
            "ledger": ledger.tokens(),
            "ledger_trajectories": ledger.trajectories(),
            "reused_tokens": ledger.reused["tokens"],
            "num_unreadable_shards": len(ledger.unreadable),
            "missing_episodes": self._feeds.missing_episodes(),
            "host": self._hosts.index,
            "num_hosts": self._hosts.num_hosts,
            "totals": self._totals.state(),
        }


def _first_use_share(groups: Sequence[Group]) -> float:
    """Of the batch's tokens, as far as this host knows its groups."""
    all_tokens = sum(int(group.rows.lengths.sum()) for group in groups)
    return sum(int(group.rows.lengths.sum()) for group in groups if group.uses == 0) / max(1, all_tokens)


def check_buffer_bytes(config: RunConfig) -> None:
    """Refuse a buffer that could never hold the batches it must: the learner would wait for ever.

    Raises:
        ConfigError: with the smallest size that works.
    """
    bytes_per_token, bytes_per_row = 16, 64  # tokens, mask and logprobs; scalars of a row
    row = config.actor.context_tokens * bytes_per_token + bytes_per_row
    smallest = _MIN_BATCHES_IN_BUFFER * config.batch_trajectories * (1 + config.actor.max_forks) * row
    if config.learner.buffer_bytes < smallest:
        raise ConfigError(
            "learner.buffer_bytes",
            config.learner.buffer_bytes,
            f"at least {smallest} ({_MIN_BATCHES_IN_BUFFER} batches of the longest trajectories)",
            "Enlarge it, or lower learner.groups_per_batch.",
        )


def check_feeds(config: RunConfig, share: Share) -> None:
    """Refuse what several feeds cannot share out.

    Raises:
        ConfigError: a batch does not divide into whole groups.
    """
    if config.learner.groups_per_batch % share.num_feeds:
        raise ConfigError(
            "learner.groups_per_batch",
            config.learner.groups_per_batch,
            f"a multiple of {share.num_feeds}, the data-parallel hosts: each gives whole groups",
            "Change it, or the mesh.",
        )

"""An actor: episodes in, shards out, within what the learner's pacing signal allows.

The loop alternates one dispatch of the engine with the cheap rest: start sessions, take in
outcomes, swap weights, rotate shards. Everything slow happens on the threads in `wire`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from tunix_core.actor.dispatch import device_parameters
from tunix_core.actor.engine import Engine
from tunix_core.actor.groups import MIN_EPISODES, Group, GroupBook
from tunix_core.actor.scheduler import MakeEnvironment, Scheduler
from tunix_core.actor.session import EpisodeFailed, EpisodeSpec, Identity
from tunix_core.actor.wire import Delivery, Poller
from tunix_core.config import RunConfig
from tunix_core.distributed.compilation import CompilationCounter
from tunix_core.environments import make_environment
from tunix_core.errors import Interrupted
from tunix_core.metrics import MetricRecorder
from tunix_core.pretrained.loading import PolicyLoader, load_tokenizer
from tunix_core.storage.control import read_stop
from tunix_core.storage.metrics_files import MetricFiles
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.store import ObjectStore
from tunix_core.storage.task_blocks import TaskBlock
from tunix_core.storage.trajectory_writer import TrajectoryWriter
from tunix_core.types import Trajectory

IDLE_SECONDS = 0.05
"""Longest sleep while no session is ready: outcomes, weights and admissions are looked at so often."""

REPORT_SECONDS = 2.0


def actor_id_of(process: str) -> str:
    """A shard's name uses '-' between its parts, so an actor's id has none."""
    return process.replace("-", "_")


class Actor:
    """One life of an actor process.

    Args:
        process: its name within the run, such as `actor-0-1`.
        incarnation: never used before.
        interrupted: set by a signal: write what is complete and end.
        log: takes a line for a person.
        environments: makes a session's environment from a seed for its latency and faults; by
            default the one that the configuration names.
    """

    def __init__(
        self,
        store: ObjectStore,
        config: RunConfig,
        *,
        process: str,
        incarnation: str,
        interrupted: threading.Event,
        log: Callable[[str], None],
        environments: MakeEnvironment | None = None,
    ) -> None:
        self._store = store
        self._config = config
        self._process = process
        self._incarnation = incarnation
        self._interrupted = interrupted
        self._log = log
        self._environments = environments or (lambda seed: make_environment(config.environment, weather_seed=seed))
        self._compilations = CompilationCounter()
        self._book = GroupBook(group_size=config.algorithm.group_size, run_seed=config.seed)
        self._closed: list[Group] = []
        self._closed_since = 0.0
        self._block: TaskBlock | None = None
        self._next_task = 0
        self._last_swap = 0.0
        self._reported = (time.monotonic(), 0)
        self._tokens_per_second = 0.0

    def run(self) -> None:
        """Generate until the run stops.

        Raises:
            Interrupted: a signal ended it first.
            Fenced: it was declared dead and must not write on.
        """
        policies = PolicyStore(self._store)
        version = self._first_version(policies)
        if version is None:
            return
        loader = PolicyLoader(policies, self._config.model, device_parameters)
        self._tokenizer = load_tokenizer(self._config.model)
        self._engine = Engine(
            self._config.model,
            self._config.actor,
            loader.load(version),
            version,
            end_of_turn=self._tokenizer.end_of_turn,
            decode=self._tokenizer.decode,
        )
        self._compilations.warmed_up()
        self._log(f"engine ready: {self._compilations.total} compilations in {self._compilations.seconds:.1f} s")
        self._recorder = MetricRecorder(self._process)
        writer = TrajectoryWriter(self._store, actor_id=actor_id_of(self._process), incarnation=self._incarnation)
        self._delivery = Delivery(writer)
        self._poller = Poller(
            self._store,
            self._config,
            loader,
            process=self._process,
            incarnation=self._incarnation,
            version=version,
            metrics=MetricFiles(self._store, self._recorder, incarnation=self._incarnation),
            progress=self.progress,
        )
        workers = (self._delivery.worker, self._poller.worker)
        for worker in workers:
            worker.start()
        asyncio.run(self._play())
        for worker in workers:
            worker.stop(None)
            worker.check()
        if not self._poller.stop_requested:
            raise Interrupted(f"{self._process}: stopped by a signal; complete groups are written")

    def _first_version(self, policies: PolicyStore) -> int | None:
        """Wait for a policy; None when the run stops before there is one."""
        while True:
            current = policies.current()
            if current is not None:
                return current.version
            if read_stop(self._store) is not None:
                return None
            if self._interrupted.wait(self._config.actor.poll_seconds):
                raise Interrupted(f"{self._process}: stopped by a signal before a policy was published")

    async def _play(self) -> None:
        config = self._config
        identity = Identity(
            actor_id=actor_id_of(self._process),
            incarnation=self._incarnation,
            environment=config.environment.name,
            temperature=config.algorithm.temperature,
            max_turns=config.actor.max_turns,
            timeout_seconds=config.environment.timeout_seconds,
        )
        scheduler = Scheduler(
            self._engine,
            identity,
            self._environments,
            self._tokenizer,
            config.seed,
            self._finished,
        )
        while not (self._poller.stop_requested or self._interrupted.is_set()):
            self._delivery.worker.check()
            self._poller.worker.check()
            self._swap()
            self._settle()
            self._admit(scheduler)
            await scheduler.step(IDLE_SECONDS)
            self._rotate()
            self._report()
        await scheduler.cancel()
        if self._closed:
            self._delivery.send(self._closed)  # less than a full shard, as each `_rotate` leaves it
            self._closed = []

    # ---- groups ---------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Groups from their start until the learner reports their shard read."""
        return self._book.num_open + len(self._closed) + self._delivery.num_unread_groups(self._poller.admission.cursor)

    def _admit(self, scheduler: Scheduler) -> None:
        allowed = self._poller.admission
        while not self._book.waiting and scheduler.num_free and self.num_in_flight < allowed.groups:
            if self._config.staleness.max_staleness == 0 and self._engine.version != allowed.clock:
                break  # only the current clock's weights make anything that can be consumed
            if self._block is None or self._next_task == self._block.stop:
                if self._poller.blocks.empty():
                    break
                self._block = self._poller.blocks.get()
                self._next_task = self._block.start
            self._book.open_group(self._block, self._next_task)
            self._next_task += 1
            self._start_sessions(scheduler)
        self._start_sessions(scheduler)

    def _start_sessions(self, scheduler: Scheduler) -> None:
        while self._book.waiting and scheduler.num_free:
            scheduler.start(self._book.waiting.popleft())

    def _finished(self, spec: EpisodeSpec, outcome: Trajectory | EpisodeFailed) -> None:
        group = self._book.take(spec, outcome)
        if group is None:
            return
        if len(group.trajectories) < MIN_EPISODES:
            self._settle_one(group)
            return
        if not self._closed:
            self._closed_since = time.monotonic()
        self._closed.append(group)

    def _rotate(self) -> None:
        """Send full shards, and what is left once its oldest group has waited long enough."""
        limit = self._config.actor.max_groups_per_shard
        while len(self._closed) >= limit:
            self._delivery.send(self._closed[:limit])
            self._closed = self._closed[limit:]
        if self._closed and time.monotonic() - self._closed_since >= self._config.actor.flush_seconds:
            self._delivery.send(self._closed)
            self._closed = []

    def _settle(self) -> None:
        while not self._delivery.delivered.empty():
            for group in self._delivery.delivered.get():
                self._settle_one(group)

    def _settle_one(self, group: Group) -> None:
        if self._book.settle(group):
            self._poller.finish(group.block)

    # ---- weights --------------------------------------------------------------------------------

    def _swap(self) -> None:
        if not self._poller.has_weights or not self._engine.can_swap():
            return
        now = time.monotonic()
        if now - self._last_swap < self._config.actor.min_swap_seconds:
            return
        self._engine.swap(*self._poller.take_weights())
        self._last_swap = now

    # ---- what is told ---------------------------------------------------------------------------

    def _report(self) -> None:
        since, tokens = self._reported
        now = time.monotonic()
        if now - since < REPORT_SECONDS:
            return
        generated = self._engine.counters.policy_tokens
        self._tokens_per_second = (generated - tokens) / (now - since)
        self._reported = (now, generated)
        figures = {name: value for name, value in self.progress().items() if isinstance(value, int | float)}
        self._recorder.record(**figures)

    def progress(self) -> dict[str, Any]:
        """The figures of heartbeat and metrics; counts are since the start of this incarnation."""
        counters = self._engine.counters
        book = self._book
        return {
            "incarnation": self._incarnation,
            "version": self._engine.version,
            "tokens_per_second": round(self._tokens_per_second, 1),
            "policy_tokens": counters.policy_tokens,
            "prefill_tokens": counters.prefill_tokens,
            "recomputed_tokens": counters.recomputed_tokens,
            "swaps": counters.swaps,
            "swap_seconds": round(counters.swap_seconds, 4),
            "decode_seconds": round(counters.decode_seconds, 3),
            "extend_seconds": round(counters.extend_seconds, 3),
            "decode_occupancy": counters.decode_live_rows / max(1, counters.decode_rows),
            "episodes": book.num_episodes,
            "success_fraction": book.num_successes / max(1, book.num_episodes),
            "mean_reward": book.reward_sum / max(1, book.num_episodes),
            "groups_in_flight": self.num_in_flight,
            "groups_allowed": self._poller.admission.groups,
            "slots_free": self._engine.num_free,
            "slots_waiting_for_tools": self._engine.num_parked,
            "shards": self._delivery.num_shards,
            "failures": dict(book.failures),
            "failed_attempts": book.failures.total(),
            "lost_episodes": book.num_lost_episodes,
            "dropped_groups": book.num_dropped_groups,
            "store_errors": self._delivery.num_store_errors + self._poller.num_store_errors,
            "compilations_after_warmup": self._compilations.after_warmup,
            "learner": self._poller.learner_state,
        }

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

from tunix_core.actor import progress
from tunix_core.actor.calls import abandonable_calls, run_loop
from tunix_core.actor.engines import make_engine, weight_loader
from tunix_core.actor.episodes import EpisodeFailed, EpisodeSpec, Identity, Outcome, limits_of
from tunix_core.actor.groups import Group, GroupBook, Outgoing
from tunix_core.actor.policy_engine import PolicyEngine
from tunix_core.actor.scheduler import MakeEnvironment, Scheduler
from tunix_core.actor.wire import Delivery, Poller
from tunix_core.config import RunConfig
from tunix_core.distributed.compilation import CompilationCounter
from tunix_core.environments import make_environment
from tunix_core.errors import EnvironmentFailure, Interrupted
from tunix_core.metrics import MetricRecorder
from tunix_core.pretrained.loading import load_tokenizer
from tunix_core.storage.control import read_stop
from tunix_core.storage.metrics_files import MetricFiles
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.store import ObjectStore
from tunix_core.storage.task_blocks import TaskBlock
from tunix_core.storage.trajectory_writer import TrajectoryWriter
from tunix_core.tokenizer import Tokenizer

IDLE_SECONDS = 0.05
"""Longest sleep while no session is ready: outcomes, weights and admissions are looked at so often."""

REPORT_SECONDS = 2.0
LINE_SECONDS = 30.0
"""Between two lines for a person."""

FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.2, 30.0
"""Before another task after a group of which nothing came, doubled with each in a row: an environment that is
down must not use up the tasks."""

LAST_WORDS_SECONDS = 10.0
"""How long the store is waited for after an error."""

MakeEngine = Callable[[RunConfig, Any, int, Tokenizer], PolicyEngine]
"""Makes the engine from weights, their version and the tokenizer."""


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
        make_engine: by default the configured one.
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
        make_engine: MakeEngine | None = None,
    ) -> None:
        self._store = store
        self._config = config
        self._process = process
        self._incarnation = incarnation
        self._interrupted = interrupted
        self._log = log
        self._environments = environments or (lambda seed: make_environment(config.environment, weather_seed=seed))
        self._make_engine = make_engine or self._configured_engine
        self._compilations = CompilationCounter()
        self._calls = abandonable_calls(config)
        self._book = GroupBook(
            group_size=config.algorithm.group_size,
            run_seed=config.seed,
            group_seconds=config.actor.group_timeout_seconds,
        )
        self._outgoing = Outgoing(
            max_groups=config.actor.max_groups_per_shard,
            max_bytes=config.actor.max_shard_bytes,
            flush_seconds=config.actor.flush_seconds,
        )
        self._block: TaskBlock | None = None
        self._next_task = 0
        self._opens_at = 0.0
        self._last_swap = 0.0
        self._reported = (time.monotonic(), 0)
        self._line_at = time.monotonic() + LINE_SECONDS
        self._tokens_per_second = 0.0
        self._oldest_session_seconds = 0.0

    def run(self) -> None:
        """Generate until the run stops.

        Raises:
            Interrupted: a signal ended it first.
            EnvironmentFailure: too many calls of environments never return; another process can begin anew.
            Fenced: it was declared dead and must not write on.
        """
        policies = PolicyStore(self._store)
        version = self._first_version(policies)
        if version is None:
            return
        loader = weight_loader(policies, self._config, self._process)
        tokenizer = load_tokenizer(self._config.model)
        limits = limits_of(self._config, tokenizer)
        self._engine = self._make_engine(self._config, loader.load(version), version, tokenizer)
        self._compilations.warmed_up()
        self._log(f"engine ready: {self._compilations.total} compilations in {self._compilations.seconds:.1f} s")
        identity = Identity(
            actor_id=actor_id_of(self._process),
            incarnation=self._incarnation,
            environment=self._config.environment.name,
            temperature=self._config.algorithm.temperature,
        )
        self._scheduler = Scheduler(
            self._engine,
            identity,
            limits,
            self._environments,
            tokenizer,
            self._config.seed,
            self._calls,
            self._finished,
        )
        self._recorder = MetricRecorder(self._process)
        writer = TrajectoryWriter(self._store, actor_id=identity.actor_id, incarnation=self._incarnation)
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
        over = False
        try:
            run_loop(self._play(), self._calls)
            over = True
        finally:
            # After an error too: what is queued is written, and a closed writer's tasks are taken up at once.
            for worker in workers:
                worker.stop(None if over else LAST_WORDS_SECONDS)
        for worker in workers:
            worker.check()
        self._log(progress.last_line(self.progress(), self._why_over))
        self._raise_unless_stopped()

    def _configured_engine(self, config: RunConfig, weights: Any, version: int, tokenizer: Tokenizer) -> PolicyEngine:
        return make_engine(config, weights, version, tokenizer, process=self._process, log=self._log)

    def _raise_unless_stopped(self) -> None:
        if self._poller.stop_requested:
            return
        if self._interrupted.is_set():
            raise Interrupted(f"{self._process}: stopped by a signal; complete groups are written")
        raise EnvironmentFailure(
            f"{self._process}: {self._calls.abandoned.num_now} calls of environments go on past their deadline, accepted at "
            f"most {self._config.actor.max_abandoned_calls} (actor.max_abandoned_calls). Let them end when cancelled."
        )

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

    @property
    def _why_over(self) -> str:
        """Empty while it goes on."""
        if self._poller.stop_requested:
            return "the run stops"
        if self._interrupted.is_set():
            return "a signal"
        if self._calls.abandoned.num_now >= self._config.actor.max_abandoned_calls:
            return "too many abandoned calls"
        return ""

    async def _started(self) -> bool:
        """Wait for the engine; False when it is over before that."""
        start = asyncio.ensure_future(self._engine.start())
        while not start.done():
            self._poller.worker.check()
            if self._why_over:
                start.cancel()
            await asyncio.wait([start], timeout=IDLE_SECONDS)
        if start.cancelled():
            return False
        await start
        return True

    async def _play(self) -> None:
        try:
            if await self._started():
                await self._generate()
        finally:
            await self._engine.close()

    async def _generate(self) -> None:
        scheduler = self._scheduler
        while not self._why_over:
            self._swap()
            self._settle()
            self._expire()
            self._admit()
            await self._step(IDLE_SECONDS)
        if not self._poller.stop_requested:  # else nobody would read it
            await self._drain()
        await scheduler.cancel()
        while groups := self._outgoing.take_rest():
            self._delivery.send(groups)

    async def _step(self, max_wait_seconds: float) -> None:
        self._delivery.worker.check()
        self._poller.worker.check()
        await self._scheduler.step(max_wait_seconds)
        if groups := self._outgoing.take(time.monotonic()):
            self._delivery.send(groups)
        self._report()

    async def _drain(self) -> None:
        """Play the groups under way on for a little while, and begin none."""
        over = time.monotonic() + self._config.actor.drain_seconds
        while self._book.num_open and (left := over - time.monotonic()) > 0 and not self._poller.stop_requested:
            self._expire()
            self._start_sessions()
            await self._step(min(IDLE_SECONDS, left))

    # ---- groups ---------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Groups from their start until the learner reports their shard read."""
        unread = self._delivery.num_unread_groups(self._poller.admission.cursor)
        return self._book.num_open + len(self._outgoing) + unread

    def _admit(self) -> None:
        """Begin what may begin. Groups that the learner will filter out are not made up for here: its capacity says so."""
        allowed = self._poller.admission
        self._start_sessions()
        while not self._book.waiting and self._scheduler.num_free and self.num_in_flight < allowed.groups:
            if self._config.staleness.max_staleness == 0 and self._engine.version != allowed.clock:
                break  # only the current clock's weights make anything that can be consumed
            if self._poller.has_weights and not self._engine.can_swap():
                break  # newer weights wait for what speaks with older ones: a new group would be stale from its start
            now = time.monotonic()
            if now < self._opens_at:
                break
            if self._block is None or self._next_task == self._block.stop:
                if self._poller.blocks.empty():
                    break
                self._block = self._poller.blocks.get()
                self._next_task = self._block.start
            self._book.open_group(self._block, self._next_task, now)
            self._next_task += 1
            self._start_sessions()

    def _start_sessions(self) -> None:
        while self._book.waiting and self._scheduler.num_free:
            self._scheduler.start(self._book.waiting.popleft())

    def _finished(self, spec: EpisodeSpec, outcome: Outcome) -> None:
        if isinstance(outcome, EpisodeFailed) and outcome.kind not in self._book.failures:
            self._log(f"first failure of its kind: {outcome}")
        group = self._book.take(spec, outcome)
        if group is not None:
            self._closed(group)

    def _expire(self) -> None:
        for group in self._book.expire(time.monotonic()):
            self._scheduler.abandon(group.group_id)
            self._closed(group)

    def _closed(self, group: Group) -> None:
        now = time.monotonic()
        if group.is_worth_writing:
            self._outgoing.add(group, now)
            return
        pause = FIRST_PAUSE_SECONDS * 2 ** min(20, self._book.num_dropped_in_a_row - 1)
        self._opens_at = now + min(LAST_PAUSE_SECONDS, pause)
        self._settle_one(group)

    def _settle(self) -> None:
        while not self._delivery.delivered.empty():
            for group in self._delivery.delivered.get():
                self._settle_one(group)

    def _settle_one(self, group: Group) -> None:
        if self._book.settle(group):
            self._poller.finish(group.block)

    # ---- weights --------------------------------------------------------------------------------

    def _swap(self) -> None:
        if not self._poller.has_weights or self._scheduler.is_generating or not self._engine.can_swap():
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
        self._oldest_session_seconds = self._scheduler.oldest_seconds
        self._reported = (now, generated)
        figures = self.progress()
        self._recorder.record(**{name: value for name, value in figures.items() if isinstance(value, int | float)})
        if now >= self._line_at:
            self._line_at = now + LINE_SECONDS
            self._log(progress.line(figures))

    def progress(self) -> dict[str, Any]:
        """The figures of heartbeat and metrics, for any thread; counts are since the start of this incarnation."""
        return {
            "incarnation": self._incarnation,
            "tokens_per_second": round(self._tokens_per_second, 1),
            "oldest_session_seconds": round(self._oldest_session_seconds, 1),
            **progress.engine_figures(self._engine),
            **progress.session_figures(self._scheduler),
            **progress.group_figures(self._book),
            "groups_in_flight": self.num_in_flight,
            "groups_allowed": self._poller.admission.groups,
            "shards": self._delivery.num_shards,
            "store_errors": self._delivery.num_store_errors + self._poller.num_store_errors,
            "compilations_after_warmup": self._compilations.after_warmup,
            "learner": self._poller.learner_state,
        }

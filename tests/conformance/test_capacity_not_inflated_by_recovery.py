"""Admission counter wrong after recovery (AReaL #1388)."""

import threading
import time

from tests.data.support import make_group
from tests.learner.support import initial_weights, make_config, make_learner, open_run, run_killed
from tunix_core import paths
from tunix_core.config import RunConfig
from tunix_core.storage.control import read_heartbeat, read_learner_signal, write_heartbeat
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.store import ObjectStore
from tunix_core.storage.trajectory_writer import TrajectoryWriter
from tunix_core.types import Trajectory

CRASH, END = 100, 112
FLUSH_GROUPS = 3
"""Groups that the pool holds back before it writes them: they are in flight and in no shard."""


class GreedyPool(threading.Thread):
    """One actor that starts a group whenever the signal lets it, and keeps a record of how much is under way."""

    def __init__(self, store: ObjectStore, config: RunConfig) -> None:
        super().__init__(daemon=True)
        self._store = store
        self._batch = config.learner.groups_per_batch
        self._writer = TrajectoryWriter(store, actor_id="actor_0_0", incarnation="a0")
        self._policies = PolicyStore(store)
        self._num_started = 0
        self._held: list[Trajectory] = []
        self._per_shard: list[int] = []
        self.over = threading.Event()
        self.under_way: list[tuple[int, int]] = []
        """(clock, groups started and in no step record) after each start."""

    def run(self) -> None:
        self._publish(0)
        while not self.over.is_set():
            write_heartbeat(self._store, "actor-0-0", {"incarnation": "a0", "time": time.time()})
            signal = read_learner_signal(self._store)
            if signal is not None and signal.live_incarnations == ["a0"]:
                self._publish(signal.clock)
                in_flight = self._num_started - sum(self._per_shard[: signal.cursors["a0"]])
                for _ in range(max(0, signal.capacity_groups - in_flight)):
                    self._start(signal.clock)
            time.sleep(0.01)

    def _publish(self, version: int) -> None:
        current = self._policies.current()
        if current is None or current.version < version:
            parent = None if current is None else current.version
            self._policies.publish(version, initial_weights(), config={}, parent=parent, publisher="pool", gate={})

    def _start(self, version: int) -> None:
        self._held += make_group(f"g{self._num_started:04d}", version=version, lengths=[9, 11])
        self._num_started += 1
        if len(self._held) >= 2 * FLUSH_GROUPS:
            self._writer.write(self._held)
            self._per_shard.append(FLUSH_GROUPS)
            self._held = []
        recorded = len(self._store.list_after(paths.STEPS)) * self._batch
        self.under_way.append((version, self._num_started - recorded))


def test_capacity_not_inflated_by_recovery(tmp_path) -> None:
    """Killed at clock 100 and restarted: work in flight and queued stays within the capacity, before and after."""
    config = make_config(
        **{
            "learner.num_steps": END,
            "learner.groups_per_batch": 4,
            "learner.max_windows": 8,
            "staleness.max_staleness": 4,
            "checkpoint.interval_steps": 7,
        }
    )
    store = open_run(tmp_path)
    pool = GreedyPool(store, config)
    pool.start()
    try:
        run_killed(store, config, where="_step", clock=CRASH, incarnation="first")
        before = len(pool.under_way)
        last = make_learner(store, config, incarnation="last")
        last.run()
    finally:
        pool.over.set()
        pool.join()
    assert last.clock == END
    beat = read_heartbeat(store, "learner")
    assert beat is not None
    # The target is below the bound: max_staleness - 1 where weights are published at once.
    capacity = config.staleness.max_staleness * config.learner.groups_per_batch
    # What went stale is in no step record, and under way no longer.
    stale = beat.progress["ledger_trajectories"]["stale"] // 2
    for life in (pool.under_way[:before], pool.under_way[before:]):
        assert life, "the pool was admitted something"
        assert max(groups for _, groups in life) <= capacity + stale
    after = [groups for clock, groups in pool.under_way[before:] if clock >= CRASH]
    assert max(after) >= config.learner.groups_per_batch, "and it was used"

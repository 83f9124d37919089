"""What a run measured of itself, as a simulation needs it: how long groups and steps take, how late weights arrive."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from tunix_core.config import RunConfig
from tunix_core.console.report import step_rows
from tunix_core.errors import ConfigError
from tunix_core.simulation.durations import Draw, empirical
from tunix_core.storage.metrics_files import read_metrics
from tunix_core.storage.shard_archive import ShardArchive
from tunix_core.storage.store import ObjectStore


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One run."""

    num_steps: int
    step_seconds: float
    """Median of the device time of a step and what follows it."""
    publish_seconds: float
    """Median from a step's end to the publication of its weights, and what an actor adds until it runs them."""
    duration_seconds: float
    groups_per_actor: int
    busy_fraction: float
    discarded_token_fraction: float
    staleness: dict[int, int]
    """Staleness at consumption -> trajectories."""
    draw: Draw
    """Groups as they were played."""

    @property
    def mean_staleness(self) -> float:
        return sum(age * count for age, count in self.staleness.items()) / max(1, sum(self.staleness.values()))

    def fields(self) -> dict[str, Any]:
        """Of a setting."""
        return {
            "step_seconds": self.step_seconds,
            "publish_seconds": self.publish_seconds,
            "groups_per_actor": self.groups_per_actor,
            "duration_seconds": self.duration_seconds,
        }


def measure(store: ObjectStore, config: RunConfig) -> Measured:
    """
    Raises:
        ConfigError: the run has made too few steps to be measured.
    """
    column = step_rows(read_metrics(store, "learner"))
    num_steps = len(column.get("clock", ()))
    if num_steps < 5:
        raise ConfigError("--run", store.uri, "a run of at least 5 steps", f"It has made {num_steps}: let it go on.")
    ended = dict(zip(column["clock"].astype(int).tolist(), column["time"].tolist(), strict=True))
    bound = config.staleness.max_staleness
    ages = {age: int(column[f"staleness_{age}"].sum()) for age in range(bound + 1)}
    read, stale = (float(column[f"ledger_{name}"][-1]) for name in ("read", "stale"))
    groups = _groups(store)
    duration = float(column["time"][-1] - column["time"][0])
    own = column["device_seconds"]
    return Measured(
        num_steps=num_steps,
        step_seconds=float(np.median(own)),
        publish_seconds=_publish_seconds(store, ended) + config.actor.poll_seconds / 2,
        duration_seconds=duration,
        busy_fraction=float(own.sum()) / max(duration, 1e-9),
        discarded_token_fraction=stale / max(1.0, read),
        staleness={age: count for age, count in ages.items() if count},
        groups_per_actor=groups.num_at_once,
        draw=empirical(groups.seconds, groups.tokens),
    )


def _publish_seconds(store: ObjectStore, ended: dict[int, float]) -> float:
    sync = read_metrics(store, "sync_weights")
    if "version" not in sync:
        return 0.0
    published = zip(sync["version"].astype(int).tolist(), sync["time"].tolist(), strict=True)
    delays = [time - ended[version] for version, time in published if version in ended]
    return max(0.0, float(np.median(delays))) if delays else 0.0


class _Groups(NamedTuple):
    """Every group that was written, M of them."""

    seconds: np.ndarray  # [M] from its first episode's start to its last one's end
    tokens: np.ndarray  # [M]
    num_at_once: int
    """Of one actor, hardly ever exceeded: finished members make room for the next group, so it is more than slots divided
    by members."""


def _groups(store: ObjectStore) -> _Groups:
    starts: dict[str, float] = defaultdict(lambda: float("inf"))
    ends: dict[str, float] = defaultdict(float)
    tokens: dict[str, float] = defaultdict(float)
    actors: dict[str, str] = {}
    archive = ShardArchive(store)
    for shard in archive.read(archive.keys()):
        rows = shard.rows
        if rows is None:
            continue
        created, played = (rows.column(name) for name in ("created_at", "generation_seconds"))
        waited, lengths = (rows.column(name) for name in ("environment_seconds", "num_tokens"))
        actor = rows.column("incarnation").tolist()
        for i, group in enumerate(rows.column("group_id").tolist()):
            starts[group] = min(starts[group], float(created[i] - played[i] - waited[i]))
            ends[group] = max(ends[group], float(created[i]))
            tokens[group] += float(lengths[i])
            actors[group] = actor[i]
    at_once = 1
    for actor_id in set(actors.values()):
        own = [name for name in actors if actors[name] == actor_id]
        first, last = np.sort([starts[name] for name in own]), np.sort([ends[name] for name in own])
        counts = np.arange(1, len(own) + 1) - np.searchsorted(last, first, "right")  # at each start
        at_once = max(at_once, int(np.quantile(counts, 0.9, method="higher")))
    return _Groups(
        np.array([max(1e-6, ends[name] - starts[name]) for name in starts]),
        np.array([tokens[name] for name in starts]),
        at_once,
    )

"""Snapshots become published policies here, behind a gate; no other module publishes after version 0.

The gate looks at numbers only: every weight finite and not huge, the same tensors in the same
shapes as before, and not too far from the policy published before. A refused snapshot is recorded
beside it and skipped; actors go on with the last good policy.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tunix_core import paths
from tunix_core.config import RunConfig, SyncConfig
from tunix_core.config_loading import config_to_dict
from tunix_core.data.rounds import run_rounds
from tunix_core.errors import CorruptObject, ObjectExists, ObjectMissing, VersionConflict
from tunix_core.metrics import MetricRecorder
from tunix_core.storage.metrics_files import MetricFiles
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.snapshots import SnapshotStore
from tunix_core.storage.store import ObjectStore, finite_or_none, write_json_if_absent

Tensors = Mapping[str, np.ndarray]


def judge(tensors: Tensors, previous: Tensors | None, sync: SyncConfig) -> tuple[str, dict[str, float]]:
    """The gate.

    Args:
        tensors: the candidate's weights by name.
        previous: those of the policy published before, None where there is none.
        sync: the limits.

    Returns:
        Why the candidate is refused, '' if it is not; and the figures that were judged:
        `max_abs_weight` and `relative_change` (L2 distance to `previous` over its norm).
    """
    figures = {"max_abs_weight": 0.0, "relative_change": 0.0}
    for name, value in tensors.items():
        if not np.isfinite(value).all():
            return f"{name} has a non-finite entry", figures | {"max_abs_weight": float("inf")}
        figures["max_abs_weight"] = max(figures["max_abs_weight"], float(np.max(np.abs(value), initial=0)))
    if figures["max_abs_weight"] > sync.max_abs_weight:
        return f"max_abs_weight {figures['max_abs_weight']:.4g} above {sync.max_abs_weight:.4g}", figures
    if previous is None:
        return "", figures
    if set(previous) != set(tensors):
        return f"other tensors than before: {sorted(set(previous) ^ set(tensors))}", figures
    distance = norm = 0.0
    for name, value in tensors.items():
        if value.shape != previous[name].shape:
            return f"{name} has shape {value.shape}, before {previous[name].shape}", figures
        before = previous[name].astype(np.float64)
        distance += float(np.sum((value - before) ** 2))
        norm += float(np.sum(before**2))
    figures["relative_change"] = (distance / max(norm, 1e-30)) ** 0.5
    if figures["relative_change"] > sync.max_relative_change:
        return f"relative_change {figures['relative_change']:.4g} above {sync.max_relative_change:.4g}", figures
    return "", figures


class _Published(NamedTuple):
    """The policy published before."""

    version: int
    tensors: Tensors
    base: Mapping[str, Any] | None
    """What its adapters lie on, as its manifest says."""


class Publisher:
    """Publishes the newest snapshot whenever it is newer than the current policy.

    All state is in the store, so a killed publisher is replaced by a new one, and two at once
    take turns: the pointer only rises, and whoever loses the race starts over from it.
    """

    def __init__(
        self, store: ObjectStore, config: RunConfig, *, process: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._config = config
        self._process = process
        self._clock = clock
        self._policies = PolicyStore(store)
        self._snapshots = SnapshotStore(store)
        self.recorder = MetricRecorder(process)
        self._previous: _Published | None = None
        self.num_published = 0
        self.num_refused = 0
        self.num_lost_races = 0
        self.published_version = -1
        self.refused_version = -1
        self.refusal = ""

    def publish_newest(self) -> bool:
        """One attempt; True when a version was published."""
        current = self._policies.current()
        self.published_version = current.version if current else -1
        version = self._snapshots.latest_version()
        if version is None or version <= max(self.published_version, self.refused_version):
            return False
        if self._store.exists(paths.snapshot_refusal(version)):
            self.refused_version = version
            return False
        started = self._clock()
        try:
            tensors = self._snapshots.load(version)
        except (CorruptObject, ObjectMissing) as error:
            return self._refuse(version, f"unreadable: {error}", {})
        previous = self._load_previous()
        reason, figures = judge(tensors, previous and previous.tensors, self._config.sync)
        if reason:
            return self._refuse(version, reason, figures)
        try:
            self._policies.publish(
                version,
                dict(tensors),
                config=config_to_dict(self._config),
                parent=self.published_version if self.published_version >= 0 else None,
                publisher=self._process,
                gate=figures,
                base=previous and previous.base,
            )
        except (ObjectExists, VersionConflict):
            self.num_lost_races += 1  # another publisher was faster; the next attempt starts from its version
            return False
        self._previous = _Published(version, tensors, previous and previous.base)
        self.published_version = version
        self.num_published += 1
        self.recorder.record(version=version, accepted=1, publish_seconds=self._clock() - started, **figures)
        return True

    def _load_previous(self) -> _Published | None:
        if self.published_version < 0:
            return None
        if self._previous is None or self._previous.version != self.published_version:
            tensors, manifest = self._policies.load(self.published_version)
            self._previous = _Published(self.published_version, tensors, manifest.get("base"))
        return self._previous

    def _refuse(self, version: int, reason: str, figures: dict[str, float]) -> bool:
        body: dict[str, Any] = {"version": version, "reason": reason, "refused_at": self._clock(), **figures}
        with contextlib.suppress(ObjectExists):  # another publisher may have judged it too
            write_json_if_absent(self._store, paths.snapshot_refusal(version), finite_or_none(body))
        self.refused_version, self.refusal = version, reason
        self.num_refused += 1
        self.recorder.record(version=version, accepted=0, **figures)
        return False

    def progress(self) -> dict[str, Any]:
        """What a person wants to see in the heartbeat."""
        return {
            "published_version": self.published_version,
            "num_published": self.num_published,
            "num_refused": self.num_refused,
            "refused_version": self.refused_version,
            "refusal": self.refusal,
            "num_lost_races": self.num_lost_races,
        }


def publish_until_stopped(
    store: ObjectStore,
    config: RunConfig,
    *,
    process: str,
    incarnation: str,
    interrupted: threading.Event,
    log: Callable[[str], None],
) -> None:
    """The whole process: rounds until the run ends, one of them after its end."""
    publisher = Publisher(store, config, process=process)

    def publish() -> None:
        refused = publisher.num_refused
        if publisher.publish_newest():
            log(f"published policy version {publisher.published_version}")
        elif publisher.num_refused > refused:
            log(f"refused snapshot {publisher.refused_version}: {publisher.refusal}")

    run_rounds(
        store,
        publish,
        interval_seconds=config.sync.interval_seconds,
        process=process,
        metrics=MetricFiles(store, publisher.recorder, incarnation=incarnation),
        progress=lambda: {"incarnation": incarnation, **publisher.progress()},
        interrupted=interrupted,
    )

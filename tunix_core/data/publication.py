"""Snapshots become published policies here, behind a gate; no other module publishes after version 0.

The gate looks at numbers only: every weight finite and not huge, the same tensors in the same
shapes as before, and not too far from the policy published before. A refused snapshot is recorded
beside it and skipped; actors go on with the last good policy.

What is published is the snapshot's files as they are. They are judged one by one on their way, with one of them in
memory and beside it a box of the policy before, so the model may be larger than this process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tunix_core import paths
from tunix_core.config import RunConfig, SyncConfig
from tunix_core.config_loading import config_to_dict
from tunix_core.data.rounds import run_rounds
from tunix_core.errors import CorruptObject, ObjectExists, ObjectMissing, VersionConflict
from tunix_core.metrics import MetricRecorder
from tunix_core.storage import tensor_files
from tunix_core.storage.metrics_files import MetricFiles
from tunix_core.storage.parts import Tensors
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.snapshots import SnapshotStore
from tunix_core.storage.store import ObjectStore, finite_or_none, write_json_if_absent
from tunix_core.storage.tensor_files import StoredBox, TensorFile


class Gate:
    """Judges a candidate as it is read, box by box.

    Afterwards `refusal` says why it is refused, '' if it is not, and `figures` has what was judged: `max_abs_weight`
    and `relative_change` (L2 distance to what was published before over its norm).
    """

    def __init__(self, sync: SyncConfig, shapes: Mapping[str, tuple[int, ...]], previous: Tensors | None) -> None:
        """
        Args:
            sync: the limits.
            shapes: of the candidate's weights, by name.
            previous: those of the policy published before, None where there is none; read where they are compared.
        """
        self._sync = sync
        self._previous = previous
        self._distance = self._norm = 0.0
        self.figures = {"max_abs_weight": 0.0, "relative_change": 0.0}
        self.refusal = self._unlike(shapes)

    def _unlike(self, shapes: Mapping[str, tuple[int, ...]]) -> str:
        if self._previous is None:
            return ""
        if set(self._previous) != set(shapes):
            return f"other tensors than before: {sorted(set(self._previous) ^ set(shapes))}"
        for name, shape in shapes.items():
            if shape != self._previous[name].shape:
                return f"{name} has shape {shape}, before {self._previous[name].shape}"
        return ""

    def take(self, box: StoredBox, value: np.ndarray) -> None:
        """A box of the candidate; nothing more is looked at once something speaks against it."""
        if self.refusal:
            return
        largest = float(np.max(np.abs(value), initial=0))
        if not np.isfinite(largest):  # NaN is the maximum of anything that holds it
            self.figures["max_abs_weight"] = float("inf")
            self.refusal = f"{box.name} has a non-finite entry"
            return
        self.figures["max_abs_weight"] = max(self.figures["max_abs_weight"], largest)
        if self._previous is not None:
            before = self._previous[box.name][box.slices].astype(np.float64)
            self._norm += float(np.sum(before**2))
            self._distance += float(np.sum((value - before) ** 2))

    def close(self) -> None:
        """All boxes were taken."""
        if self.refusal:
            return
        figures, sync = self.figures, self._sync
        figures["relative_change"] = (self._distance / max(self._norm, 1e-30)) ** 0.5
        if figures["max_abs_weight"] > sync.max_abs_weight:
            self.refusal = f"max_abs_weight {figures['max_abs_weight']:.4g} above {sync.max_abs_weight:.4g}"
        elif figures["relative_change"] > sync.max_relative_change:
            self.refusal = f"relative_change {figures['relative_change']:.4g} above {sync.max_relative_change:.4g}"


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
            manifest = self._snapshots.manifest(version)
            boxes = tensor_files.boxes(manifest)
        except (CorruptObject, ObjectMissing) as error:
            return self._refuse(version, f"unreadable: {error}", {})
        previous, base = self._load_previous()
        shapes = {box.name: tuple(box.shape) for rows in boxes.values() for box in rows}
        gate = Gate(self._config.sync, shapes, previous)
        try:
            draft = self._policies.begin(version, self._process)
            draft.put(self._passed(manifest, gate))
            gate.close()
            if gate.refusal:
                draft.discard()
                return self._refuse(version, gate.refusal, gate.figures)
            draft.complete(
                config=config_to_dict(self._config),
                parent=self.published_version if self.published_version >= 0 else None,
                gate=gate.figures,
                base=base,
            )
        except (ObjectExists, VersionConflict):
            self.num_lost_races += 1  # another publisher was faster; the next attempt starts from its version
            return False
        self.published_version = version
        self.num_published += 1
        self.recorder.record(version=version, accepted=1, publish_seconds=self._clock() - started, **gate.figures)
        return True

    def _passed(self, manifest: Mapping[str, Any], gate: Gate) -> Iterator[TensorFile]:
        """The snapshot's files, as long as nothing speaks against it; one of them is in memory at a time."""
        files = tensor_files.read_files(self._store, manifest)
        while not gate.refusal:
            try:  # about the snapshot alone: a damaged policy before it is no fault of this one
                file = next(files, None)
                arrays = list(file.arrays()) if file else []
            except (CorruptObject, ObjectMissing) as error:
                gate.refusal = f"unreadable: {error}"
                return
            if file is None:
                return
            for box, array in arrays:
                gate.take(box, array)
            yield file
            del file, arrays

    def _load_previous(self) -> tuple[Tensors | None, Mapping[str, Any] | None]:
        """The policy published before, and what its adapters lie on, as its manifest says."""
        if self.published_version < 0:
            return None, None
        tensors, manifest = self._policies.open(self.published_version)
        return tensors, manifest.get("base")

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

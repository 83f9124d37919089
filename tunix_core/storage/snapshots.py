"""Weights straight from the learner, `snapshots/<version>/`: what sync_weights publishes from.

Each host of the learner writes files of the parts that it holds, so no host ever gathers the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunix_core import paths
from tunix_core.errors import CorruptObject, ObjectExists
from tunix_core.storage import multifile, tensor_files
from tunix_core.storage.parts import Tensors
from tunix_core.storage.store import ObjectStore


class SnapshotStore:
    """Writes and loads snapshots of one run."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._latest = -1

    def write(self, version: int, tensors: Mapping[str, np.ndarray], *, incarnation: str) -> None:
        """Write it unless it is complete: a recovered learner passes versions again, with equal weights."""
        self.complete(version, [self.write_part(version, tensors, incarnation=incarnation)], incarnation=incarnation)

    def write_part(self, version: int, tensors: Tensors, *, incarnation: str, host: int = 0) -> dict[str, Any]:
        """The files of one host; what it returns goes to `complete`. Nothing is written where the snapshot is complete."""
        folder = paths.snapshot(version)
        if self._store.exists(folder + paths.MANIFEST):
            return {}
        files = tensor_files.encoded(tensors, prefix=f"{host:05d}-" if host else "")
        entries, boxes = tensor_files.put(self._store, folder, multifile.attempt_name(incarnation), files)
        return {"files": {name: list(entry) for name, entry in entries.items()}, tensor_files.FIELD: boxes}

    def complete(self, version: int, parts: Sequence[Mapping[str, Any]], *, incarnation: str) -> None:
        """The manifest over the files of all hosts, in host order. Fine where it is complete already."""
        folder = paths.snapshot(version)
        if not all(parts) or self._store.exists(folder + paths.MANIFEST):
            return
        entries = {name: multifile.FileEntry(*entry) for part in parts for name, entry in part["files"].items()}
        boxes = {name: rows for part in parts for name, rows in part[tensor_files.FIELD].items()}
        fields: dict[str, Any] = {"version": version, "incarnation": incarnation, tensor_files.FIELD: boxes}
        with contextlib.suppress(ObjectExists):
            multifile.put_manifest(self._store, folder, multifile.attempt_name(incarnation), entries, fields)

    def latest_version(self) -> int | None:
        """The newest complete version; None before the first. Costs what is newer than the last answer."""
        newer = multifile.complete_versions(self._store, paths.SNAPSHOTS, self._latest)
        if newer:
            self._latest = newer[-1]
        return self._latest if self._latest >= 0 else None

    def versions(self) -> list[int]:
        """All complete versions, ascending."""
        return multifile.complete_versions(self._store, paths.SNAPSHOTS)

    def manifest(self, version: int) -> dict[str, Any]:
        """Raises ObjectMissing when it is not complete."""
        manifest = multifile.read_manifest(self._store, paths.snapshot(version))
        if manifest.get("version") != version:
            raise CorruptObject(f"{paths.snapshot(version)}: its manifest is of version {manifest.get('version')!r}")
        return manifest

    def load(self, version: int) -> dict[str, np.ndarray]:
        """Raises ObjectMissing when it is not complete, CorruptObject when its bytes are not the promised ones."""
        return tensor_files.load(self._store, self.manifest(version))

    def delete(self, version: int) -> None:
        """Remove a snapshot that nothing needs any more; the caller has made sure of that."""
        multifile.delete_object(self._store, paths.snapshot(version))

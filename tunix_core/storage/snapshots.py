"""Weights straight from the learner, `snapshots/<version>/`: what sync_weights publishes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tunix_core import paths
from tunix_core.errors import CorruptObject, ObjectExists
from tunix_core.storage import multifile
from tunix_core.storage.store import ObjectStore


class SnapshotStore:
    """Writes and loads snapshots of one run."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._latest = -1

    def write(self, version: int, tensors: Mapping[str, np.ndarray], *, incarnation: str) -> None:
        """Write it unless it is complete: a recovered learner passes versions again, with equal weights."""
        folder = paths.snapshot(version)
        if self._store.exists(folder + paths.MANIFEST):
            return
        attempt = multifile.attempt_name(incarnation)
        files = [(multifile.WEIGHTS, multifile.encode_tensors(tensors))]
        entries = multifile.put_files(self._store, folder, attempt, files)
        fields: dict[str, Any] = {"version": version, "incarnation": incarnation}
        try:
            multifile.put_manifest(self._store, folder, attempt, entries, fields)
        except ObjectExists:
            return

    def latest_version(self) -> int | None:
        """The newest complete version; None before the first. Costs what is newer than the last answer."""
        newer = multifile.complete_versions(self._store, paths.SNAPSHOTS, self._latest)
        if newer:
            self._latest = newer[-1]
        return self._latest if self._latest >= 0 else None

    def versions(self) -> list[int]:
        """All complete versions, ascending."""
        return multifile.complete_versions(self._store, paths.SNAPSHOTS)

    def load(self, version: int) -> dict[str, np.ndarray]:
        """Raises ObjectMissing when it is not complete, CorruptObject when its bytes are not the promised ones."""
        manifest = multifile.read_manifest(self._store, paths.snapshot(version))
        if manifest.get("version") != version:
            raise CorruptObject(f"{paths.snapshot(version)}: its manifest is of version {manifest.get('version')!r}")
        data = multifile.read_file(self._store, manifest, multifile.WEIGHTS)
        return multifile.decode_tensors(data, f"snapshot {version}")

    def delete(self, version: int) -> None:
        """Remove a snapshot that nothing needs any more; the caller has made sure of that."""
        multifile.delete_object(self._store, paths.snapshot(version))

"""Weights straight from the learner, `snapshots/<version>/`: what sync_weights publishes from.

Each host of the learner writes a file of the parts that it holds, so no host ever gathers the model; who loads a
snapshot reads one file at a time and puts the parts in their places.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunix_core import paths
from tunix_core.errors import CorruptObject, ObjectExists
from tunix_core.storage import multifile
from tunix_core.storage.parts import Tensors, joined, to_write
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
        """The file of one host; what it returns goes to `complete`. Nothing is written where the snapshot is complete."""
        folder = paths.snapshot(version)
        if self._store.exists(folder + paths.MANIFEST):
            return {}
        arrays, table = to_write(tensors)
        name = multifile.WEIGHTS if not host else f"{host:05d}-{multifile.WEIGHTS}"
        files = [(name, multifile.encode_tensors(arrays))]
        entries = multifile.put_files(self._store, folder, multifile.attempt_name(incarnation), files)
        return {"files": {name: list(entry) for name, entry in entries.items()}, "tables": {name: table}}

    def complete(self, version: int, parts: Sequence[Mapping[str, Any]], *, incarnation: str) -> None:
        """The manifest over the files of all hosts, in host order. Fine where it is complete already."""
        folder = paths.snapshot(version)
        if not all(parts) or self._store.exists(folder + paths.MANIFEST):
            return
        entries = {name: multifile.FileEntry(*entry) for part in parts for name, entry in part["files"].items()}
        tables = {name: table for part in parts for name, table in part["tables"].items() if table}
        fields: dict[str, Any] = {"version": version, "incarnation": incarnation, "tables": tables}
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

    def load(self, version: int) -> dict[str, np.ndarray]:
        """Raises ObjectMissing when it is not complete, CorruptObject when its bytes are not the promised ones."""
        manifest = multifile.read_manifest(self._store, paths.snapshot(version))
        if manifest.get("version") != version:
            raise CorruptObject(f"{paths.snapshot(version)}: its manifest is of version {manifest.get('version')!r}")
        files = []
        for name in manifest["files"]:
            tensors = multifile.decode_tensors(multifile.read_file(self._store, manifest, name), f"snapshot {version}")
            files.append((tensors, manifest.get("tables", {}).get(name, {})))
        return joined(files)

    def delete(self, version: int) -> None:
        """Remove a snapshot that nothing needs any more; the caller has made sure of that."""
        multifile.delete_object(self._store, paths.snapshot(version))

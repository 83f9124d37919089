"""Published policy versions: `policies/<version>/` and the pointer `policies/CURRENT.json`.

A version is complete when its manifest exists, and only the first publisher of a version can create
that. The pointer moves by compare-and-swap and only upwards; a rollback publishes old weights as a
new version. A publisher that dies between the two leaves a complete version that the next
publication, of the same version or a later one, steps over or points to.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tunix_core import paths
from tunix_core.errors import CorruptObject, ObjectExists, ObjectMissing, VersionConflict
from tunix_core.storage import multifile, tensor_files
from tunix_core.storage.multifile import FileEntry
from tunix_core.storage.parts import Parts, Tensors
from tunix_core.storage.store import (
    ObjectStore,
    from_json,
    map_requests,
    read_json_or_none,
    to_json,
    update_json,
)
from tunix_core.storage.tensor_files import TensorFile


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurrentPolicy:
    """What `CURRENT.json` points to."""

    version: int
    manifest: str
    """Key of its manifest."""
    published_at: float
    """Seconds since the epoch, by the publisher's clock."""


class PolicyDraft:
    """A version that is being written; nobody sees it before `complete`."""

    def __init__(self, store: ObjectStore, version: int, publisher: str) -> None:
        self._store = store
        self._version = version
        self._publisher = publisher
        self._attempt = multifile.attempt_name(publisher)
        self._folder = paths.policy(version)
        self._files: dict[str, FileEntry] = {}
        self._boxes: dict[str, list[Any]] = {}

    def put(self, files: Iterable[TensorFile]) -> None:
        """Write weights, one file in memory at a time."""
        entries, boxes = tensor_files.put(self._store, self._folder, self._attempt, files)
        self._files |= entries
        self._boxes |= boxes

    def complete(
        self,
        *,
        config: Mapping[str, Any],
        parent: int | None,
        gate: Mapping[str, Any],
        restored_from: int | None = None,
        base: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Publish what was put and point to it. Arguments, errors and result as of `PolicyStore.publish`."""
        fields = {
            "version": self._version,
            "parent": parent,
            "publisher": self._publisher,
            "gate": dict(gate),
            "restored_from": restored_from,
            "base": None if base is None else dict(base),
            tensor_files.FIELD: self._boxes,
        }
        entry = multifile.put_files(self._store, self._folder, self._attempt, [(multifile.CONFIG, to_json(config))])
        try:
            manifest = multifile.put_manifest(self._store, self._folder, self._attempt, self._files | entry, fields)
        except ObjectExists:
            _advance(self._store, self._version)
            raise
        _advance(self._store, self._version)
        return manifest

    def discard(self) -> None:
        """Delete what was put."""
        map_requests(self._store, self._store.delete, [entry.key for entry in self._files.values()])


class PolicyStore:
    """Publishes and loads policy versions of one run."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def begin(self, version: int, publisher: str) -> PolicyDraft:
        """Start writing a version; arguments and errors as of `publish`."""
        current = self.current()
        if current is not None and current.version > version:
            raise VersionConflict(
                f"policy version: received {version}, accepted above the current {current.version}. "
                "Publish older weights as a new version with restored_from."
            )
        if self._store.exists(paths.policy(version) + paths.MANIFEST):
            _advance(self._store, version)  # whoever completed it may have died before pointing to it
            raise ObjectExists(f"{self._store.uri}: policy {version} is published")
        return PolicyDraft(self._store, version, publisher)

    def publish(
        self,
        version: int,
        tensors: Tensors,
        *,
        config: Mapping[str, Any],
        parent: int | None,
        publisher: str,
        gate: Mapping[str, Any],
        restored_from: int | None = None,
        base: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Write the version and point to it; returns its manifest.

        Args:
            version: the clock at which the weights were snapshotted; above the current one.
            config: what a reader needs to use the weights (model, tokenizer), saved as `config.json`.
            parent: the version published before; None for the first.
            publisher: name of the publishing process, part of the data files' names.
            gate: the figures by which the gate let it pass.
            restored_from: the version whose weights a rollback publishes again.
            base: `uri` and `sha256` of the model that the tensors are adapters of; None: they are all of it.

        Raises:
            ObjectExists: another publisher completed this version; the pointer is at least there now.
            VersionConflict: the pointer is above `version` already.
        """
        draft = self.begin(version, publisher)
        draft.put(tensor_files.encoded(tensors))
        return draft.complete(config=config, parent=parent, gate=gate, restored_from=restored_from, base=base)

    def current(self) -> CurrentPolicy | None:
        """The newest version; None before the first."""
        value = read_json_or_none(self._store, paths.CURRENT_POLICY)
        if value is None:
            return None
        try:
            return CurrentPolicy(
                version=int(value["version"]),
                manifest=str(value["manifest"]),
                published_at=float(value["published_at"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptObject(f"{paths.CURRENT_POLICY}: {error!r}") from error

    def versions(self, after: int = -1) -> list[int]:
        """Complete versions above `after`, ascending."""
        return multifile.complete_versions(self._store, paths.POLICIES, after)

    def manifest(self, version: int) -> dict[str, Any]:
        """Raises ObjectMissing when the version is not complete."""
        return multifile.read_manifest(self._store, paths.policy(version))

    def config(self, version: int) -> dict[str, Any]:
        """The `config` it was published with, verified."""
        manifest = self.manifest(version)
        data = multifile.read_file(self._store, manifest, multifile.CONFIG)
        return from_json(multifile.file_entry(manifest, multifile.CONFIG).key, data)

    def load(self, version: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Whole tensors, and the manifest.

        Raises:
            ObjectMissing: the version is not complete.
            CorruptObject: bytes that differ from the manifest's SHA-256, or boxes that do not make up whole tensors.
        """
        manifest = self._checked_manifest(version)
        return tensor_files.load(self._store, manifest), manifest

    def open(self, version: int) -> tuple[dict[str, Parts], dict[str, Any]]:
        """Tensors whose boxes are read where they are needed (and can be corrupt then), and the manifest. Raises as `load`."""
        manifest = self._checked_manifest(version)
        return tensor_files.opened(self._store, manifest), manifest

    def _checked_manifest(self, version: int) -> dict[str, Any]:
        manifest = self.manifest(version)
        if manifest.get("version") != version:
            raise CorruptObject(f"{paths.policy(version)}: its manifest is of version {manifest.get('version')!r}")
        return manifest


def _advance(store: ObjectStore, version: int) -> None:
    if not store.exists(paths.policy(version) + paths.MANIFEST):
        raise ObjectMissing(f"{store.uri}: policy {version} is not complete")

    def point(current: dict[str, Any] | None) -> dict[str, Any] | None:
        if current is not None and int(current["version"]) >= version:
            return None
        return {
            "version": version,
            "manifest": paths.policy(version) + paths.MANIFEST,
            "published_at": time.time(),
        }

    update_json(store, paths.CURRENT_POLICY, point)

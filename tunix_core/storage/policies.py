"""Published policy versions: `policies/<version>/` and the pointer `policies/CURRENT.json`.

A version is complete when its manifest exists, and only the first publisher of a version can create
that. The pointer moves by compare-and-swap and only upwards; a rollback publishes old weights as a
new version. A publisher that dies between the two leaves a complete version that the next
publication, of the same version or a later one, steps over or points to.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from tunix_core import paths
from tunix_core.errors import CorruptObject, ObjectExists, ObjectMissing, VersionConflict
from tunix_core.storage import multifile
from tunix_core.storage.store import ObjectStore, from_json, read_json_or_none, to_json, update_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurrentPolicy:
    """What `CURRENT.json` points to."""

    version: int
    manifest: str
    """Key of its manifest."""
    published_at: float
    """Seconds since the epoch, by the publisher's clock."""


class PolicyStore:
    """Publishes and loads policy versions of one run."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def publish(
        self,
        version: int,
        tensors: Mapping[str, np.ndarray],
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
        current = self.current()
        if current is not None and current.version > version:
            raise VersionConflict(
                f"policy version: received {version}, accepted above the current {current.version}. "
                "Publish older weights as a new version with restored_from."
            )
        folder = paths.policy(version)
        attempt = multifile.attempt_name(publisher)
        fields = {
            "version": version,
            "parent": parent,
            "publisher": publisher,
            "gate": dict(gate),
            "restored_from": restored_from,
            "base": None if base is None else dict(base),
        }
        try:
            if self._store.exists(folder + paths.MANIFEST):
                raise ObjectExists(f"{self._store.uri}: policy {version} is published")
            files = [(multifile.WEIGHTS, multifile.encode_tensors(tensors)), (multifile.CONFIG, to_json(config))]
            entries = multifile.put_files(self._store, folder, attempt, files)
            manifest = multifile.put_manifest(self._store, folder, attempt, entries, fields)
        except ObjectExists:
            self._advance(version)  # whoever completed it may have died before pointing to it
            raise
        self._advance(version)
        return manifest

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
        """Tensors and manifest.

        Raises:
            ObjectMissing: the version is not complete.
            CorruptObject: bytes that differ from the manifest's SHA-256, or no safetensors.
        """
        manifest = self.manifest(version)
        if manifest.get("version") != version:
            raise CorruptObject(f"{paths.policy(version)}: its manifest is of version {manifest.get('version')!r}")
        data = multifile.read_file(self._store, manifest, multifile.WEIGHTS)
        return multifile.decode_tensors(data, f"policy {version}"), manifest

    def _advance(self, version: int) -> None:
        if not self._store.exists(paths.policy(version) + paths.MANIFEST):
            raise ObjectMissing(f"{self._store.uri}: policy {version} is not complete")

        def point(current: dict[str, Any] | None) -> dict[str, Any] | None:
            if current is not None and int(current["version"]) >= version:
                return None
            return {
                "version": version,
                "manifest": paths.policy(version) + paths.MANIFEST,
                "published_at": time.time(),
            }

        update_json(self._store, paths.CURRENT_POLICY, point)

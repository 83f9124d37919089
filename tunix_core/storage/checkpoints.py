"""Checkpoints, `checkpoints/<clock>/`: a local directory (Orbax wrote it) uploaded as one object.

Deletion has two phases: `retire` marks it and takes it out of `clocks()`; `delete_retired` removes what
was marked long enough ago, after looking again that nothing protects it. A reader that chose a checkpoint
just before it was retired has the grace to finish, and holds it longer by a lease.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from tunix_core import paths
from tunix_core.errors import CorruptObject, DataError, ObjectExists
from tunix_core.storage import multifile, retirement
from tunix_core.storage.store import ObjectStore


class CheckpointStore:
    """Uploads, verifies, restores and retires checkpoints of one run."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def upload(
        self, clock: int, local_dir: str | os.PathLike[str], *, metadata: dict[str, Any], incarnation: str
    ) -> None:
        """Upload every file of `local_dir`, then the manifest with `metadata` (JSON).

        A checkpoint of that clock that is complete already is left alone: the state at a clock is the
        same whoever computes it.

        Raises:
            DataError: an empty or missing directory, or metadata that is no JSON.
        """
        self.complete(
            clock,
            [self.upload_part(clock, local_dir, incarnation=incarnation)],
            metadata=metadata,
            incarnation=incarnation,
        )

    def upload_part(
        self, clock: int, local_dir: str | os.PathLike[str], *, incarnation: str, under: str = ""
    ) -> dict[str, Any]:
        """Upload the files of one host; what it returns goes to `complete`. Nothing, where the checkpoint is complete.

        Args:
            under: put before their names, such as `host-00001/`.

        Raises:
            DataError: an empty or missing directory.
        """
        folder = paths.checkpoint(clock)
        if self._store.exists(folder + paths.MANIFEST):
            return {}
        files = ((under + name, data) for name, data in _local_files(Path(local_dir)))
        entries = multifile.put_files(self._store, folder, multifile.attempt_name(incarnation), files)
        if not entries:
            raise DataError(f"checkpoint {clock}: received no files in {os.fspath(local_dir)!r}, accepted at least one")
        return {name: list(entry) for name, entry in entries.items()}

    def complete(
        self, clock: int, parts: Sequence[Mapping[str, Any]], *, metadata: dict[str, Any], incarnation: str
    ) -> None:
        """The manifest over the files of all hosts. Fine where it is complete already.

        Raises:
            DataError: metadata that is no JSON.
        """
        folder = paths.checkpoint(clock)
        if not all(parts) or self._store.exists(folder + paths.MANIFEST):
            return
        entries = {name: multifile.FileEntry(*entry) for part in parts for name, entry in part.items()}
        fields = {"clock": clock, "incarnation": incarnation, "metadata": metadata}
        with contextlib.suppress(ObjectExists):
            multifile.put_manifest(self._store, folder, multifile.attempt_name(incarnation), entries, fields)

    def download(self, clock: int, local_dir: str | os.PathLike[str], *, under: str = "") -> dict[str, Any]:
        """Restore the directory, or its files under `under` alone; returns the metadata.

        Raises:
            ObjectMissing: no complete checkpoint of that clock.
            CorruptObject: a file that differs from the manifest, or a name that leads out of the directory.
        """
        manifest = self.manifest(clock)
        root = Path(local_dir)
        for name in manifest["files"]:
            pure = PurePosixPath(name)
            if pure.is_absolute() or ".." in pure.parts or "\0" in name:
                raise CorruptObject(f"checkpoint {clock}: file name {name!r} leads out of the directory")
            if name.startswith(under):
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(multifile.read_file(self._store, manifest, name))
        return dict(manifest["metadata"])

    def manifest(self, clock: int) -> dict[str, Any]:
        """Raises ObjectMissing when the checkpoint is not complete."""
        manifest = multifile.read_manifest(self._store, paths.checkpoint(clock))
        if manifest.get("clock") != clock or not isinstance(manifest.get("metadata"), dict):
            raise CorruptObject(f"{paths.checkpoint(clock)}: its manifest is of clock {manifest.get('clock')!r}")
        return manifest

    def metadata(self, clock: int) -> dict[str, Any]:
        """What was uploaded beside the files: cursors, ledger, references."""
        return dict(self.manifest(clock)["metadata"])

    def clocks(self) -> list[int]:
        """Complete checkpoints that are not retired, ascending."""
        return multifile.complete_versions(self._store, paths.CHECKPOINTS)

    def verify(self, clock: int, *, chosen: Callable[[int], bool] = lambda _: True) -> int:
        """Read every file, or the chosen ones by their place in order of names, against its SHA-256; returns the bytes read.

        Raises:
            ObjectMissing, CorruptObject: it could not be restored.
        """
        manifest = self.manifest(clock)
        names = [name for place, name in enumerate(sorted(manifest["files"])) if chosen(place)]
        return sum(len(multifile.read_file(self._store, manifest, name)) for name in names)

    def retire(self, clock: int, *, reason: str) -> None:
        """First half of deletion; fine to repeat (the first mark's time counts)."""
        retirement.retire(self._store, paths.checkpoint(clock), reason=reason)

    def retired(self) -> dict[int, float]:
        """Clock -> when it was retired (seconds since the epoch), for those not deleted yet."""
        found = retirement.retired(self._store, paths.CHECKPOINTS)
        return {paths.version_of(folder): marked for folder, marked in found.items()}

    def delete_retired(
        self, *, grace_seconds: float, protected: Collection[int] = (), clock: Callable[[], float] = time.time
    ) -> list[int]:
        """Second half: delete what was retired at least `grace_seconds` ago; returns the clocks deleted.

        Args:
            protected: clocks that something refers to by now; kept, whatever their mark says, as those are that are leased.

        Where no unretired complete checkpoint exists, nothing is deleted: the last way back stays.
        """
        if not self.clocks():
            return []
        folders = retirement.delete_retired(
            self._store,
            paths.CHECKPOINTS,
            grace_seconds=grace_seconds,
            protected={paths.checkpoint(clock) for clock in protected},
            clock=clock,
        )
        return [paths.version_of(folder) for folder in folders]


def _local_files(root: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(root.rglob("*")):
        if path.is_file():
            yield path.relative_to(root).as_posix(), path.read_bytes()

"""Objects of several files: data files first, under a folder of their own attempt, MANIFEST.json last.

Such an object exists when its manifest does. Data files of attempts that died, or lost, lie beside it
unmentioned and are deleted with it. Every file is verified against the manifest's SHA-256 when read.
"""

from __future__ import annotations

import hashlib
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tunix_core import paths
from tunix_core.errors import CorruptObject, DataError, ObjectMissing
from tunix_core.storage.store import ObjectStore, map_requests, read_json, write_json_if_absent

_FORMAT = 1
WEIGHTS = "model.safetensors"
CONFIG = "config.json"


class FileEntry(NamedTuple):
    """One file in a manifest."""

    key: str
    sha256: str
    num_bytes: int


def attempt_name(owner: str) -> str:
    """A folder name for one attempt of `owner` (a process or incarnation) to write an object."""
    return f"{re.sub(r'[^a-z0-9_.]+', '-', owner.lower()).strip('-.')[:80] or 'attempt'}-{uuid.uuid4().hex[:12]}"


def put_files(
    store: ObjectStore, folder: str, attempt: str, files: Iterable[tuple[str, bytes]]
) -> dict[str, FileEntry]:
    """Write data files durably; one is in memory at a time. Names may contain `/`."""
    entries: dict[str, FileEntry] = {}
    for name, data in files:
        # keys have no component led by '.', some checkpoint formats have
        safe = "/".join(re.sub(r"^\.", "%2E", part) for part in name.split("/"))
        key = f"{folder}{attempt}/{safe}"
        store.put_if_absent(key, data)
        entries[name] = FileEntry(key, hashlib.sha256(data).hexdigest(), len(data))
        del data  # before the next one is made
    return entries


def put_manifest(
    store: ObjectStore, folder: str, attempt: str, files: Mapping[str, FileEntry], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Complete the object.

    Raises:
        ObjectExists: another attempt has completed it.
    """
    manifest = {
        **fields,
        "format": _FORMAT,
        "attempt": attempt,
        "completed_at": time.time(),
        "files": {name: entry._asdict() for name, entry in files.items()},
    }
    write_json_if_absent(store, folder + paths.MANIFEST, manifest)
    return manifest


def read_manifest(store: ObjectStore, folder: str) -> dict[str, Any]:
    """Raises ObjectMissing when the object is not complete, CorruptObject for a bad manifest."""
    manifest = read_json(store, folder + paths.MANIFEST)
    if manifest.get("format") != _FORMAT:
        raise CorruptObject(f"{folder}{paths.MANIFEST}: received format {manifest.get('format')!r}, accepted {_FORMAT}")
    try:
        for name in manifest["files"]:
            entry = file_entry(manifest, name)
            if not entry.key.startswith(folder):
                raise CorruptObject(f"{folder}{paths.MANIFEST}: file {name!r} lies outside the object: {entry.key!r}")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CorruptObject(f"{folder}{paths.MANIFEST}: malformed file table ({error!r})") from error
    return manifest


def file_entry(manifest: Mapping[str, Any], name: str) -> FileEntry:
    """Raises KeyError for a file that the manifest does not name."""
    return FileEntry(**manifest["files"][name])


def read_file(store: ObjectStore, manifest: Mapping[str, Any], name: str) -> bytes:
    """A verified file.

    Raises:
        CorruptObject: missing, or other bytes than the manifest promises.
    """
    if name not in manifest["files"]:
        raise CorruptObject(f"file {name!r}: not in the manifest, which has {sorted(manifest['files'])}")
    entry = file_entry(manifest, name)
    try:
        data = store.get(entry.key)
    except ObjectMissing as error:
        raise CorruptObject(f"{entry.key}: named by its manifest but missing") from error
    digest = hashlib.sha256(data).hexdigest()
    if digest != entry.sha256:
        raise CorruptObject(
            f"{entry.key}: received sha256 {digest} ({len(data)} bytes), "
            f"promised {entry.sha256} ({entry.num_bytes} bytes)"
        )
    return data


def complete_versions(store: ObjectStore, prefix: str, after: int = -1) -> list[int]:
    """Versions above `after` under `prefix` (like `policies/`) that are complete and not retired, ascending.

    Costs the files of the versions listed: pass `after` where older ones are known.
    """
    start = f"{prefix}{after:08d}0" if after >= 0 else ""  # '0' sorts behind '/': past all of that version's keys
    manifests: set[int] = set()
    retired: set[int] = set()
    for key in store.list_after(prefix, start):
        parts = key.split("/")
        if len(parts) == 3 and parts[1].isdecimal():
            if parts[2] == paths.MANIFEST:
                manifests.add(int(parts[1]))
            elif parts[2] == paths.RETIRED:
                retired.add(int(parts[1]))
    return sorted(manifests - retired)


def delete_object(store: ObjectStore, folder: str) -> int:
    """Remove the object, manifest first, so that no half of it ever looks complete; returns how many files."""
    keys = store.list_after(folder)
    store.delete(folder + paths.MANIFEST)
    # the retirement mark goes last: with it a deletion that died half way is found and finished
    rest = [key for key in keys if key not in (folder + paths.MANIFEST, folder + paths.RETIRED)]
    map_requests(store, store.delete, rest)
    store.delete(folder + paths.RETIRED)
    return len(keys)


# --- tensors ----------------------------------------------------------------------------------


def encode_tensors(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """Safetensors bytes, the same for the same tensors."""
    import safetensors.numpy  # an extra of learner and actor; the rest of this module works without

    for name, tensor in tensors.items():
        if not isinstance(tensor, np.ndarray):
            raise DataError(f"tensor {name}: received a {type(tensor).__name__}, accepted a NumPy array")
    ordered = {name: np.asarray(tensors[name], order="C") for name in sorted(tensors)}
    return safetensors.numpy.save(ordered, dict(metadata) if metadata else None)


_TENSOR_TYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U8": "u1"}


def decode_tensors(data: bytes, what: str) -> dict[str, np.ndarray]:
    """The inverse; bfloat16 included. Raises CorruptObject, naming `what`."""
    import safetensors

    try:
        entries = safetensors.deserialize(data)
        return {name: _tensor(entry) for name, entry in entries}
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CorruptObject(f"{what}: no safetensors file ({error})") from error


def tensor_type(code: str) -> np.dtype[Any]:
    """Of a safetensors file's name for it. Raises KeyError."""
    if code == "BF16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    if code == "BOOL":
        return np.dtype(bool)
    return np.dtype(_TENSOR_TYPES[code]).newbyteorder("<")


def _tensor(entry: Mapping[str, Any]) -> np.ndarray:
    return np.frombuffer(entry["data"], tensor_type(entry["dtype"])).reshape(entry["shape"])

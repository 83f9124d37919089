"""Four exact verbs (and four plain ones) over a local folder, memory or Google Cloud Storage.

What must be exact goes through `put_if_absent`, `get_with_version`, `put_if_version` and
`list_after`: each is whole or nothing, durable when it returns, and linearizable per key, however
many processes race. `put` replaces a whole object without a condition; on a local folder it is
atomic but not synced to disk, so it is for what the next second rewrites (heartbeats, signals).
"""

from __future__ import annotations

import concurrent.futures
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from tunix_core.errors import ConfigError, CorruptObject, DataError, ObjectExists, ObjectMissing, VersionConflict
from tunix_core.storage.attempts import RequestCounts

Version = str
"""Opaque; changes with every write of an object, also one that writes the same bytes."""

_MAX_KEY_BYTES = 900
_MAX_COMPONENT_BYTES = 240
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._\-]{1,220}[a-z0-9]")
_SPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,127}")

_In = TypeVar("_In")
_Out = TypeVar("_Out")


class ObjectStore(Protocol):
    """One prefix of a store; keys are relative to it and use `/`."""

    uri: str
    parallel_requests: int
    """How many requests at a time pay off: 1 where a request costs no round trip."""
    counts: RequestCounts
    """What was sent to it so far."""

    def put_if_absent(self, key: str, data: bytes) -> Version:
        """Create the object, whole and durable.

        Raises:
            ObjectExists: the key is taken (not by this very call).
        """

    def get_with_version(self, key: str) -> tuple[bytes, Version]:
        """The bytes and the version they have, read together.

        Raises:
            ObjectMissing: no such object.
        """

    def put_if_version(self, key: str, data: bytes, version: Version) -> Version:
        """Replace the object if it still has `version`; durable; returns the new version.

        Raises:
            VersionConflict: it changed since.
            ObjectMissing: it is gone.
        """

    def list_after(self, prefix: str, after: str = "") -> list[str]:
        """Keys that start with `prefix` and sort after `after`, in order, folders descended into."""

    def get(self, key: str) -> bytes:
        """The bytes. Raises ObjectMissing."""

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Bytes `start` to before `stop`, fewer where the object ends earlier; no others are read. Raises ObjectMissing."""

    def put(self, key: str, data: bytes) -> None:
        """Create or replace the whole object; readers see the old bytes or the new ones."""

    def exists(self, key: str) -> bool:
        """Whether there is such an object."""

    def delete(self, key: str) -> None:
        """Remove the object; a missing one is fine."""


def check_key(key: str) -> str:
    """Return `key` if every backend can hold it and no file system escapes by it.

    Raises:
        ConfigError: absolute, empty, with `.`-led or empty components, control characters or too long.
    """
    _check_text(key, "key")
    components = key.split("/")
    if any(not part or part.startswith(".") or len(part.encode()) > _MAX_COMPONENT_BYTES for part in components):
        raise _key_error("key", key)
    return key


def check_prefix(prefix: str) -> str:
    """Like `check_key`, for the start of keys: it may be empty or end anywhere."""
    if prefix:
        _check_text(prefix, "prefix")
        if any(not part or part.startswith(".") for part in prefix.split("/")[:-1]) or prefix.split("/")[-1][:1] == ".":
            raise _key_error("prefix", prefix)
    return prefix


def _check_text(key: str, field: str) -> None:
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise _key_error(field, key) from None
    if not 0 < size <= _MAX_KEY_BYTES or any(ord(c) < 32 or ord(c) == 127 for c in key):
        raise _key_error(field, key)


def _key_error(field: str, key: str) -> ConfigError:
    return ConfigError(
        field,
        key,
        f"components of at most {_MAX_COMPONENT_BYTES} bytes joined by '/', none empty or led by '.', "
        f"no control characters, at most {_MAX_KEY_BYTES} bytes",
        "Build keys with tunix_core.paths.",
    )


def normalize_uri(uri: str) -> str:
    """The canonical form: `file:///absolute/path`, `gs://bucket[/prefix]` or `memory://name`.

    Raises:
        ConfigError: another scheme, or a malformed bucket, prefix or name.
    """
    if not isinstance(uri, str) or not uri or any(ord(c) < 32 for c in uri):
        raise _uri_error(uri, "Name the folder or bucket that holds the run.")
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return f"file://{Path(uri).expanduser().resolve()}"
    if scheme == "file":
        if not rest.startswith("/"):
            raise _uri_error(uri, "A file URI has three slashes and an absolute path.")
        return f"file://{Path(rest).resolve()}"
    if scheme == "memory":
        if not all(_SPACE.fullmatch(part) for part in rest.rstrip("/").split("/")):
            raise _uri_error(uri, "Name a memory store with letters, digits, '.', '_' and '-'.")
        return f"memory://{rest.rstrip('/')}"
    if scheme == "gs":
        bucket, _, prefix = rest.partition("/")
        if not _BUCKET.fullmatch(bucket):
            raise _uri_error(uri, "A bucket's name has 3 to 222 of a-z 0-9 . _ -.")
        prefix = prefix.rstrip("/")
        if prefix:
            check_key(prefix)
        return f"gs://{bucket}/{prefix}" if prefix else f"gs://{bucket}"
    raise _uri_error(uri, f"Scheme {scheme!r} has no exact conditional writes here yet.")


def _uri_error(uri: object, remedy: str) -> ConfigError:
    return ConfigError("store uri", uri, "a path, file:///path, gs://bucket/prefix or memory://name", remedy)


def join_uri(uri: str, *parts: str) -> str:
    """`uri` with validated components appended."""
    return "/".join([uri.rstrip("/"), *(check_key(part) for part in parts)])


def check_under_roots(uri: str, roots: Iterable[str]) -> str:
    """Return the canonical URI if it is one of `roots` or lies under one.

    Local paths are compared after links are resolved, so a link cannot lead out of a root.

    Raises:
        ConfigError: it lies elsewhere.
    """
    canonical = normalize_uri(uri)
    allowed = [normalize_uri(root) for root in roots]
    for root in allowed:
        if canonical == root or canonical.startswith(root.rstrip("/") + "/"):
            return canonical
    raise ConfigError(
        "store uri",
        uri,
        "a URI under one of: " + (", ".join(allowed) or "(no roots are configured)"),
        "Put the run under a configured root, or configure another root.",
    )


def open_store(uri: str, *, roots: Iterable[str] | None = None) -> ObjectStore:
    """Open the store at `uri`; nothing is created until something is written.

    Args:
        uri: a plain path, `file:///path`, `gs://bucket/prefix` (also an emulator, by the environment
            variable STORAGE_EMULATOR_HOST) or `memory://name` (one process).
        roots: where given, `uri` must lie under one of them.

    Raises:
        ConfigError: an unsupported or malformed URI, or one outside the roots.
    """
    canonical = normalize_uri(uri) if roots is None else check_under_roots(uri, roots)
    scheme, _, rest = canonical.partition("://")
    if scheme == "file":
        from tunix_core.storage.local_store import LocalStore

        return LocalStore(Path(rest))
    if scheme == "memory":
        from tunix_core.storage.memory_store import MemoryStore

        return MemoryStore(rest)
    from tunix_core.storage.gcs_store import GcsStore  # imports gcsfs, 1 to 2 s

    bucket, _, prefix = rest.partition("/")
    return GcsStore(bucket, prefix)


def map_requests(store: ObjectStore, function: Callable[[_In], _Out], items: Iterable[_In]) -> list[_Out]:
    """`[function(item) for item in items]`, overlapping round trips where the store has them."""
    work = list(items)
    if store.parallel_requests == 1 or len(work) < 2:
        return [function(item) for item in work]
    with concurrent.futures.ThreadPoolExecutor(min(len(work), store.parallel_requests)) as pool:
        return list(pool.map(function, work))


# --- JSON objects -----------------------------------------------------------------------------


def to_json(value: Mapping[str, Any]) -> bytes:
    """Stable, readable JSON. NumPy scalars and arrays become numbers and lists.

    Raises:
        DataError: a non-finite number or a value that JSON cannot hold.
    """
    try:
        return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False, default=_plain) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise DataError(f"JSON object: {error}; accepted finite numbers, texts, lists and tables of them") from error


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"received a {type(value).__name__}")


def finite_or_none(value: Any) -> Any:
    """`value` with every non-finite number, at any depth, replaced by None: JSON has no NaN."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite_or_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(item) for item in value]
    return value


def from_json(key: str, data: bytes) -> dict[str, Any]:
    """Raises CorruptObject when `data` is not a JSON table."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptObject(f"{key}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise CorruptObject(f"{key}: received a JSON {type(value).__name__}, accepted a table")
    return value


def read_json(store: ObjectStore, key: str) -> dict[str, Any]:
    """Raises ObjectMissing, or CorruptObject when it is not a JSON table."""
    return from_json(key, store.get(key))


def read_json_or_none(store: ObjectStore, key: str) -> dict[str, Any] | None:
    """Like `read_json`; None when there is no such object."""
    try:
        return read_json(store, key)
    except ObjectMissing:
        return None


def write_json_if_absent(store: ObjectStore, key: str, value: Mapping[str, Any]) -> Version:
    """Raises ObjectExists when the key is taken."""
    return store.put_if_absent(key, to_json(value))


def write_json(store: ObjectStore, key: str, value: Mapping[str, Any]) -> None:
    """Replace without a condition."""
    store.put(key, to_json(value))


def update_json(
    store: ObjectStore,
    key: str,
    fn: Callable[[dict[str, Any] | None], Mapping[str, Any] | None],
    retries: int = 20,
) -> dict[str, Any] | None:
    """Read, change and write back by compare-and-swap until no one was faster.

    Args:
        fn: receives the current value (None: no object yet) and returns the new one, or None to
            leave it alone. It may run several times.
        retries: how many lost races are tolerated.

    Returns:
        The value that the object has afterwards, as far as this call knows.

    Raises:
        VersionConflict: every attempt lost.
    """
    for attempt in range(retries + 1):
        try:
            data, version = store.get_with_version(key)
            current: dict[str, Any] | None = from_json(key, data)
        except ObjectMissing:
            current, version = None, None
        changed = fn(None if current is None else dict(current))
        if changed is None:
            return current
        encoded = to_json(changed)
        try:
            if version is None:
                store.put_if_absent(key, encoded)
            else:
                store.put_if_version(key, encoded, version)
            return from_json(key, encoded)
        except (ObjectExists, ObjectMissing, VersionConflict):
            time.sleep(random.uniform(0, min(0.5, 0.005 * 2**attempt)))
    raise VersionConflict(f"{key}: lost {retries + 1} races in a row")

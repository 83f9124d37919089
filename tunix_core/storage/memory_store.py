"""A store inside one process, for tests and for trying things: same verbs, same guarantees."""

from __future__ import annotations

import itertools
import threading

from tunix_core.errors import ObjectExists, ObjectMissing, VersionConflict
from tunix_core.storage.attempts import RequestCounts, counted
from tunix_core.storage.store import Version, check_key, check_prefix


class _Space:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, tuple[bytes, Version]] = {}
        self.generations = itertools.count(1)


_SPACES: dict[str, _Space] = {}
_SPACES_LOCK = threading.Lock()


class MemoryStore:
    """`memory://name[/prefix]`: stores of one name share their objects for the process's life."""

    parallel_requests = 1

    def __init__(self, name: str) -> None:
        self.uri = f"memory://{name}"
        self.counts = RequestCounts()
        space, _, prefix = name.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        with _SPACES_LOCK:
            self._space = _SPACES.setdefault(space, _Space())

    def _full(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _write(self, full: str, data: bytes) -> Version:
        version = str(next(self._space.generations))
        self._space.objects[full] = (bytes(data), version)
        return version

    def _read(self, key: str) -> tuple[bytes, Version]:
        full = self._full(key)
        with self._space.lock:
            if full not in self._space.objects:
                raise ObjectMissing(f"{self.uri}: no object {key}")
            return self._space.objects[full]

    @counted
    def put_if_absent(self, key: str, data: bytes) -> Version:
        full = self._full(key)
        with self._space.lock:
            if full in self._space.objects:
                raise ObjectExists(f"{self.uri}: {key} exists")
            return self._write(full, data)

    @counted
    def get_with_version(self, key: str) -> tuple[bytes, Version]:
        return self._read(key)

    @counted
    def put_if_version(self, key: str, data: bytes, version: Version) -> Version:
        full = self._full(key)
        with self._space.lock:
            if full not in self._space.objects:
                raise ObjectMissing(f"{self.uri}: no object {key}")
            if self._space.objects[full][1] != version:
                raise VersionConflict(f"{self.uri}: {key} changed since version {version}")
            return self._write(full, data)

    @counted
    def list_after(self, prefix: str, after: str = "") -> list[str]:
        full = self._prefix + check_prefix(prefix)
        cut = len(self._prefix)
        with self._space.lock:
            keys = [key[cut:] for key in self._space.objects if key.startswith(full)]
        return sorted(key for key in keys if key > after)

    @counted
    def get(self, key: str) -> bytes:
        return self._read(key)[0]

    @counted
    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self._read(key)[0][start:stop]

    @counted
    def put(self, key: str, data: bytes) -> None:
        full = self._full(key)
        with self._space.lock:
            self._write(full, data)

    @counted
    def exists(self, key: str) -> bool:
        full = self._full(key)
        with self._space.lock:
            return full in self._space.objects

    @counted
    def delete(self, key: str) -> None:
        full = self._full(key)
        with self._space.lock:
            self._space.objects.pop(full, None)

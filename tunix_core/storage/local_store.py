"""A folder as an object store.

- Create-only: temporary file, fsync, `os.link` (fails when the name is taken), fsync of the folder.
- Compare-and-swap: under `flock` of a lock file, so that check and rename are one step.
- A version is the file's modification time in nanoseconds plus its inode. Each writer sets the time
  explicitly, and a replacement always gets a later one than what it replaces, so that writing the
  same bytes again is a new version too. (The time serves as the counter; one inside the body would
  keep bodies from being arbitrary bytes.)
- Temporary and lock files live in `<root>/.tmp` and `<root>/.locks`; no key has a component led by
  '.', so no listing ever shows them. What a killed writer left there is removed a day later.
- `put` renames a temporary file over the object: atomic for readers, but not synced to disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from tunix_core.errors import ConfigError, ObjectExists, ObjectMissing, StoreError, VersionConflict
from tunix_core.storage.attempts import RequestCounts, counted
from tunix_core.storage.store import Version, check_key, check_prefix

_NUM_LOCKS = 256
_LEFTOVER_SECONDS = 86_400
_TRANSIENT = frozenset({errno.EIO, errno.ESTALE, errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT, errno.ENFILE})
_NUM_ATTEMPTS = 4

_T = TypeVar("_T")


class LocalStore:
    """`file:///root`. Every process that shares it must see the same file system (with `flock`)."""

    parallel_requests = 1

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = f"file://{root}"
        self.counts = RequestCounts()
        self._temporary = root / ".tmp"
        self._locks = root / ".locks"
        self._prepared = False

    # --- the four exact verbs ---

    @counted
    def put_if_absent(self, key: str, data: bytes) -> Version:
        target = self._path(key)
        with self._errors(key), self._temporary_file(data, sync=True) as (temporary, version):
            self._make_folder(target.parent)
            try:
                os.link(temporary, target)
            except FileExistsError:
                raise ObjectExists(f"{self.uri}: {key} exists") from None
            _sync_folder(target.parent)
            return version

    @counted
    def get_with_version(self, key: str) -> tuple[bytes, Version]:
        return self._read(key, lambda file: (file.read(), _version(os.fstat(file.fileno()))))

    @counted
    def put_if_version(self, key: str, data: bytes, version: Version) -> Version:
        target = self._path(key)
        with self._errors(key), self._locked(key):
            found = self._stat(target)
            if found is None:
                raise ObjectMissing(f"{self.uri}: no object {key}")
            if _version(found) != version:
                raise VersionConflict(f"{self.uri}: {key} changed since version {version}")
            with self._temporary_file(data, sync=True, later_than=found.st_mtime_ns) as (temporary, new):
                os.replace(temporary, target)
                _sync_folder(target.parent)
            return new

    @counted
    def list_after(self, prefix: str, after: str = "") -> list[str]:
        check_prefix(prefix)
        folder = prefix.rpartition("/")[0]
        found: list[str] = []
        with self._errors(prefix):
            self._walk(f"{folder}/" if folder else "", prefix, after, found)
        return sorted(found)

    # --- the plain ones ---

    @counted
    def get(self, key: str) -> bytes:
        return self._read(key, lambda file: file.read())

    @counted
    def get_range(self, key: str, start: int, stop: int) -> bytes:
        def read(file: BinaryIO) -> bytes:
            file.seek(start)
            return file.read(stop - start)

        return self._read(key, read)

    @counted
    def put(self, key: str, data: bytes) -> None:
        target = self._path(key)
        with self._errors(key), self._locked(key):
            found = self._stat(target)
            with self._temporary_file(data, sync=False, later_than=found.st_mtime_ns if found else 0) as (temporary, _):
                self._make_folder(target.parent)
                os.replace(temporary, target)

    @counted
    def exists(self, key: str) -> bool:
        with self._errors(key):
            return self._stat(self._path(key)) is not None

    @counted
    def delete(self, key: str) -> None:
        target = self._path(key)
        if not target.exists():
            return
        with self._errors(key), self._locked(key), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(target)
            _sync_folder(target.parent)

    # --- how ---

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _read(self, key: str, read: Callable[[BinaryIO], _T]) -> _T:
        path = self._path(key)
        for attempt in range(_NUM_ATTEMPTS):
            try:
                with open(path, "rb") as file:  # files are never changed in place: what is read belongs together
                    return read(file)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                raise ObjectMissing(f"{self.uri}: no object {key}") from None
            except OSError as error:
                if error.errno not in _TRANSIENT or attempt == _NUM_ATTEMPTS - 1:
                    raise StoreError(f"{self.uri}: reading {key}: {error}") from error
                time.sleep(0.05 * 4**attempt)
        raise AssertionError("unreachable")

    @staticmethod
    def _stat(path: Path) -> os.stat_result | None:
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found if path.is_file() else None

    def _walk(self, folder: str, prefix: str, after: str, found: list[str]) -> None:
        try:
            entries = list(os.scandir(self.root / folder if folder else self.root))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            if entry.name.startswith("."):
                continue
            key = folder + entry.name
            if entry.is_dir():
                below = f"{key}/"
                wanted = below.startswith(prefix) or prefix.startswith(below)
                # skip a folder whose keys all sort before `after`: a poll must not walk history
                if wanted and (after <= below or after.startswith(below)):
                    self._walk(below, prefix, after, found)
            elif key.startswith(prefix) and key > after:
                found.append(key)

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except (IsADirectoryError, NotADirectoryError) as error:
            raise ConfigError("key", key, "no key that is also the folder of another", f"{error}.") from error
        except OSError as error:  # the project's own errors are no OSErrors
            raise StoreError(f"{self.uri}: {key}: {error}") from error

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        self._prepare()
        # few lock files for many keys: two keys may share one, which costs a short wait and nothing else
        lock = self._locks / f"{zlib.crc32(key.encode()) % _NUM_LOCKS:03d}"
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _temporary_file(self, data: bytes, *, sync: bool, later_than: int = 0) -> Iterator[tuple[Path, Version]]:
        self._prepare()
        path = self._temporary / uuid.uuid4().hex
        try:
            with open(path, "xb") as file:
                file.write(data)
                file.flush()
                moment = max(time.time_ns(), later_than + 1)
                os.utime(file.fileno(), ns=(moment, moment))
                if sync:
                    os.fsync(file.fileno())
                found = os.fstat(file.fileno())
            if found.st_mtime_ns != moment:
                raise StoreError(
                    f"{self.uri}: file times are coarser than nanoseconds here, so versions could repeat; "
                    "use a native file system (ext4, xfs, btrfs, tmpfs)"
                )
            yield path, _version(found)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _prepare(self) -> None:
        if self._prepared and self._temporary.is_dir():
            return
        for folder in (self._temporary, self._locks):
            self._make_folder(folder)
        oldest = time.time() - _LEFTOVER_SECONDS
        for entry in os.scandir(self._temporary):
            with contextlib.suppress(FileNotFoundError):
                if entry.stat().st_mtime < oldest:
                    os.unlink(entry.path)
        self._prepared = True

    def _make_folder(self, folder: Path) -> None:
        """Create it and its parents, each durably: a file is only as durable as its folder's entry."""
        if folder.is_dir():
            return
        self._make_folder(folder.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        _sync_folder(folder.parent)


def _version(found: os.stat_result) -> Version:
    return f"{found.st_mtime_ns}-{found.st_ino}"


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

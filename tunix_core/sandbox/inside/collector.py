"""Reads the files that a call left and hands them to the pool; nothing of the call runs any more."""

from __future__ import annotations

import errno
import os
import socket
import stat

from tunix_core.sandbox.inside import wire

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_DEPTH = 40
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""ELOOP: a link is on the way."""


class TooMuch(ValueError):
    """More than may be handed back."""


def collect(data: socket.socket) -> None:
    """Answer the pool's request: named files, or the whole tree of the working directory.

    Links are never followed, so a file is handed back only where its path in the sandbox is what its name says.
    """
    wanted = wire.from_json(wire.read_frame(data))
    root = os.open("/tmp/work", _FOLDER)
    try:
        found = _Collection(wanted["max_bytes"], wanted["max_entries"])
        if wanted["names"] is None:
            _tree(found, root, b"", 0)
        else:
            _named(found, root, wanted["names"])
        body = b"".join(found.parts)
    except (OSError, ValueError, MemoryError):
        data.sendall(wire.collected_header(wire.COLLECTED_FAILED, 0))
        return
    data.sendall(wire.collected_header(wire.COLLECTED, len(body)))
    data.sendall(body)


class _Collection:
    """Bounded by bytes before a file is read, since a sparse file may claim any size."""

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self._bytes_left = max_bytes
        self._entries_left = max_entries
        self.parts: list[bytes] = []

    def add(self, kind: int, mode: int, path: bytes, data: bytes = b"") -> None:
        self._bytes_left -= len(data)
        self._entries_left -= 1
        if self._bytes_left < 0 or self._entries_left < 0:
            raise TooMuch
        self.parts.append(wire.pack_entry(wire.Entry(kind, mode, path, data)))

    def add_file(self, folder: int, name: bytes, path: bytes, mode: int) -> None:
        content = _read(folder, name, self._bytes_left)
        if content is not None:
            self.add(stat.S_IFREG, mode, path, content)


def _read(folder: int, name: bytes, max_bytes: int) -> bytes | None:
    """A regular file's bytes; None for anything else."""
    try:
        descriptor = os.open(name, _FILE, dir_fd=folder)
    except OSError:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            return None
        os.chmod(name, 0o600, dir_fd=folder)  # its owner took its own right to read
        descriptor = os.open(name, _FILE, dir_fd=folder)
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        if status.st_size > max_bytes:
            raise TooMuch
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _named(found: _Collection, root: int, names: list[str]) -> None:
    for name in names:
        path = os.fsencode(name)
        *folders, last = path.split(b"/")
        opened = []
        try:
            folder = root
            for part in folders:
                folder = os.open(part, _FOLDER, dir_fd=folder)
                opened.append(folder)
            found.add_file(folder, last, path, 0o644)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
        finally:
            for descriptor in opened:
                os.close(descriptor)


def _tree(found: _Collection, folder: int, prefix: bytes, depth: int) -> None:
    """Depth first, parents before what is in them."""
    if depth > _MAX_DEPTH:
        raise TooMuch
    for name in sorted(os.listdir(folder)):
        raw = os.fsencode(name)
        path = prefix + raw
        status = os.stat(raw, dir_fd=folder, follow_symlinks=False)
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISLNK(status.st_mode):
            found.add(stat.S_IFLNK, 0o777, path, os.readlink(raw, dir_fd=folder))
        elif stat.S_ISDIR(status.st_mode):
            found.add(stat.S_IFDIR, mode, path)
            if mode & 0o700 != 0o700:
                os.chmod(raw, 0o700, dir_fd=folder)
            inner = os.open(raw, _FOLDER, dir_fd=folder)
            try:
                _tree(found, inner, path + b"/", depth + 1)
            finally:
                os.close(inner)
        elif stat.S_ISREG(status.st_mode):
            found.add_file(folder, raw, path, mode)

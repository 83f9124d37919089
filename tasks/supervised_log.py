"""The output of a supervised process: a bounded local file, copied to `logs/<process>.log`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

from tunix_core import paths
from tunix_core.errors import ConfigError, ObjectMissing
from tunix_core.storage.store import ObjectStore

MAX_PUBLISHED_BYTES = 512 * 1024
"""The end of the output that the run directory keeps."""
MAX_LOCAL_BYTES = 32 * 2**20


def local_log_folder(run_uri: str) -> Path:
    """Folder of this user's local logs of a run, on this host.

    Raises:
        ConfigError: someone else made the folder first.
    """
    base = Path(tempfile.gettempdir()) / f"tunix-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    if base.is_symlink() or base.stat().st_uid != os.getuid():
        raise ConfigError("TMPDIR", str(base), "a folder of this user", "Remove it or set TMPDIR elsewhere.")
    folder = base / hashlib.sha256(run_uri.encode()).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    return folder


class SupervisedLog:
    """Children append to `path`; the supervisor adds notes and publishes the end of it.

    An earlier attempt's output is kept in front, as far as the bound allows.
    """

    def __init__(self, store: ObjectStore, process: str, folder: Path, attempt: int) -> None:
        self._store = store
        self._key = paths.log(process)
        self.path = folder / f"{process}.log"
        self._published: tuple[int, int] | None = None
        earlier = b""
        if attempt > 1:
            with contextlib.suppress(ObjectMissing):
                earlier = store.get(self._key)[-MAX_PUBLISHED_BYTES // 2 :]
        self.path.write_bytes(earlier)
        self.note(f"attempt {attempt}")

    def open(self) -> BinaryIO:
        return self.path.open("ab")

    def note(self, text: str) -> None:
        """A line of the supervisor's own."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with self.open() as file:
            file.write(f"{stamp} supervisor: {text}\n".encode())

    def _tail(self, num_bytes: int) -> bytes:
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            tail = file.read()
        if size > num_bytes:
            tail = b"[earlier output was cut]\n" + tail.partition(b"\n")[2]
        return tail

    def publish(self) -> None:
        """Copy the end of the output to the run directory if there is more of it."""
        status = self.path.stat()
        mark = (status.st_size, status.st_mtime_ns)
        if mark == self._published:
            return
        tail = self._tail(MAX_PUBLISHED_BYTES)
        self._store.put(self._key, tail)
        self._published = mark
        if status.st_size > MAX_LOCAL_BYTES:
            # Children hold it open for appending, so they go on at its new end.
            os.truncate(self.path, 0)
            with self.open() as file:
                file.write(tail)

    def last_line(self) -> str:
        """The last line that the process itself wrote, shortened; says why it ended, often."""
        lines = [line for line in self._tail(8192).decode(errors="replace").splitlines() if line.strip()]
        own = [line for line in lines if " supervisor: " not in line]
        return own[-1].strip()[-300:] if own else "no output"

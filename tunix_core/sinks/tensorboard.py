"""TensorBoard event files, written locally and kept up to date in the run directory.

`tensorboard --logdir URI/logs/tensorboard` then shows a run that goes on. A store cannot append, so the file in
hand is uploaded whole: it is kept small, and a new one begins where it has grown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tunix_core import paths
from tunix_core.errors import StoreError
from tunix_core.storage.store import ObjectStore
from tunix_core.threads import Worker

UPLOAD_SECONDS = 1.0
"""As often as a heartbeat."""
PART_BYTES = 2**20
_CLOSE_SECONDS = 5.0


class TensorBoardSink:
    """A scalar per metric; the step is the clock after it."""

    def __init__(
        self,
        new_writer: Callable[[str], Any],
        store: ObjectStore,
        folder: Path,
        *,
        process: str,
        incarnation: str,
        upload_seconds: float = UPLOAD_SECONDS,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """
        Args:
            new_writer: `tensorboardX.SummaryWriter`: folder -> a writer of one event file.
            folder: local, for the event files.
        """
        self._new_writer = new_writer
        self._store = store
        self._folder = folder
        self._process = process
        self._incarnation = incarnation
        self._upload_seconds = upload_seconds
        self._part_bytes = part_bytes
        self._created_at = int(time.time())
        self._lock = threading.Lock()
        """Held while a row is written and while the file is read: an upload ends with a whole record."""
        self._part = 0
        self._writer = new_writer(str(self._part_folder()))
        self._changed = False
        self._uploader = Worker("tensorboard-upload", self._keep_up_to_date)
        self._uploader.start()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._uploader.check()
        with self._lock:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)
            self._changed = True

    def close(self) -> None:
        self._uploader.stop(_CLOSE_SECONDS)
        self._uploader.check()
        self._upload()
        self._writer.close()

    def _keep_up_to_date(self, stop: threading.Event) -> None:
        while not stop.wait(self._upload_seconds):
            try:
                self._upload()
            except StoreError:
                self._changed = True  # the next turn is the retry

    def _upload(self) -> None:
        with self._lock:
            if not self._changed:
                return
            self._changed = False
            self._writer.flush()
            (file,) = self._part_folder().iterdir()
            data = file.read_bytes()
            key = paths.tensorboard(self._process, self._created_at, self._incarnation, self._part)
        self._store.put(key, data)
        if len(data) >= self._part_bytes:
            with self._lock:
                if not self._changed:  # else its last rows are uploaded first
                    self._writer.close()
                    self._part += 1
                    self._writer = self._new_writer(str(self._part_folder()))

    def _part_folder(self) -> Path:
        return self._folder / f"part-{self._part:04d}"

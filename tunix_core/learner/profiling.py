"""A `jax.profiler` trace of a few steps, asked for by `control/profile.json` while the learner runs.

The pulse thread sees the request and claims it (create-only, so no later life of the learner runs it again), the
stepping thread traces, a thread of its own uploads to `profiles/<id>/`, the manifest last. A trace that cannot be
made is logged and counted; it never ends the run.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from tunix_core import paths
from tunix_core.errors import ConfigError, CorruptObject
from tunix_core.storage import multifile
from tunix_core.storage.control import ProfileRequest, claim_profile, read_profile_request
from tunix_core.storage.store import ObjectStore
from tunix_core.threads import Worker, with_retries

_UPLOAD_SECONDS = 20.0


@dataclasses.dataclass(kw_only=True)
class _Trace:
    request: ProfileRequest
    folder: str
    first_clock: int
    num_steps: int = 0


class StepProfiler:
    """`poll` belongs to the pulse thread, the rest to the one that steps."""

    def __init__(self, store: ObjectStore, *, incarnation: str, log: Callable[[str], None]) -> None:
        self._store = store
        self._incarnation = incarnation
        self._log = log
        self._known: Any = None
        """Id, or text, of the request that was seen last."""
        self._pending: ProfileRequest | None = None
        self._trace: _Trace | None = None
        self._uploads: list[Worker] = []
        self.num_failures = 0

    @property
    def current(self) -> str:
        """Id of the trace that is asked for or running, or nothing."""
        pending = self._pending
        return "" if pending is None else pending.id

    def poll(self) -> None:
        """Look for a new request and claim it. Raises StoreError; the next poll is the retry."""
        if self._pending is not None:
            return  # one at a time; a newer request waits where it is
        try:
            request = read_profile_request(self._store)
        except (ConfigError, CorruptObject) as error:
            if str(error) != self._known:
                self._known = str(error)
                self._failed(f"no trace: {error}")
            return
        if request is None or request.id == self._known:
            return
        claimed = claim_profile(self._store, request, incarnation=self._incarnation)
        self._known = request.id
        if claimed:
            self._pending = request

    def step_begins(self, clock: int) -> None:
        """Start the trace that is asked for; `clock` is the one before the step."""
        request = self._pending
        if request is None or self._trace is not None:
            return
        folder = tempfile.mkdtemp(prefix="tunix-profile-")
        try:
            jax.profiler.start_trace(folder)
        except Exception as error:  # a trace by someone else in this process, a full disk
            shutil.rmtree(folder, ignore_errors=True)
            self._failed(f"trace {request.id}: not started ({error})")
            self._pending = None
            return
        self._trace = _Trace(request=request, folder=folder, first_clock=clock + 1)

    def step_ended(self) -> None:
        """Stop the trace after its last step."""
        if self._trace is not None:
            self._trace.num_steps += 1
            if self._trace.num_steps >= self._trace.request.steps:
                self._stop()

    def close(self) -> None:
        """Stop what runs, if the run ends before its last step, and wait for uploads."""
        if self._trace is not None:
            self._stop()
        for upload in self._uploads:
            upload.stop(_UPLOAD_SECONDS)

    def _stop(self) -> None:
        trace, self._trace = self._trace, None
        assert trace is not None
        try:
            jax.profiler.stop_trace()
        except Exception as error:
            shutil.rmtree(trace.folder, ignore_errors=True)
            self._failed(f"trace {trace.request.id}: lost ({error})")
        else:
            upload = Worker("profile-upload", lambda stop: self._upload(trace, stop))
            self._uploads.append(upload)
            upload.start()
        self._pending = None

    def _upload(self, trace: _Trace, stop: threading.Event) -> None:
        folder = paths.profile(trace.request.id)

        def write() -> None:
            attempt = multifile.attempt_name(self._incarnation)  # a new one for each try: its keys are create-only
            entries = multifile.put_files(self._store, folder, attempt, _files(trace.folder))
            fields = {
                "id": trace.request.id,
                "incarnation": self._incarnation,
                "first_clock": trace.first_clock,
                "num_steps": trace.num_steps,
            }
            multifile.put_manifest(self._store, folder, attempt, entries, fields)

        try:
            with_retries(write, stop)
            self._log(f"trace of {trace.num_steps} steps from {trace.first_clock} on: {self._store.uri}/{folder}")
        except Exception as error:
            self._failed(f"trace {trace.request.id}: not uploaded ({error})")
        finally:
            shutil.rmtree(trace.folder, ignore_errors=True)

    def _failed(self, text: str) -> None:
        self.num_failures += 1
        self._log(text)


def _files(folder: str) -> Iterator[tuple[str, bytes]]:
    root = Path(folder)
    for path in sorted(root.rglob("*")):
        if path.is_file():
            yield path.relative_to(root).as_posix(), path.read_bytes()

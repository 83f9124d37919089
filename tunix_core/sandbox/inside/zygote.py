"""Process 1 of a sandbox: forks a process per call, kills what the call leaves, and empties /tmp.

It never reads a byte of a call: the forked process reads its own source, and output goes past the
zygote into descriptors that the pool made. For every later call is a copy of this process's memory,
and could search it for the tests, or the files, of an earlier one.

It alone may mount (of its own user namespace, inside bubblewrap), for a fresh /tmp per call; a call's
process gives that up, and installs the seccomp filter, before it reads anything.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress

from tunix_core.sandbox.inside import kernel, wire

WORK = "/tmp/work"
_COLLECT_SECONDS = 10.0
_PRELOADED = (
    "argparse ast asyncio base64 bisect collections.abc contextlib copy csv dataclasses datetime decimal enum fractions "
    "functools hashlib heapq inspect io itertools linecache math operator random re shutil statistics string struct "
    "tempfile textwrap threading types typing unittest zlib"
)
"""Loaded once, so that a call that imports them does not pay for it."""


def _prepare() -> None:
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for name in _PRELOADED.split():
        __import__(name)
    for name in ("LD_LIBRARY_PATH", "PWD"):
        os.environ.pop(name, None)
    sys.dont_write_bytecode = True
    # What comes after finds what is loaded here untouched by its garbage collections: pages stay shared.
    gc.collect()
    gc.freeze()


def _kill_everything() -> None:
    """One `kill(-1)` reaches every process of the namespace but this one: a fork that it interrupts fails."""
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


class _Zygote:
    def __init__(self, control: socket.socket, seccomp_filter: kernel.Filter) -> None:
        self._control = control
        self._filter = seccomp_filter

    def serve(self) -> None:
        self._control.send(wire.READY)
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._control, 256, 3)
            if not message:
                os._exit(0)
            if message == wire.KILL:
                continue  # for a call that had ended
            data, output, errors = descriptors
            self._call(wire.Request.unpack(message), data, output, errors)

    def _call(self, request: wire.Request, data: int, output: int, errors: int) -> None:
        started = time.monotonic()
        kernel.mount_tmpfs("/tmp", request.tmp_bytes, request.tmp_files)
        os.mkdir(WORK, 0o755)
        os.mkdir("/tmp/shm", 0o700)
        pid = self._fork(request, data, output, errors)
        os.close(output)
        os.close(errors)
        timed_out, status, cpu_seconds = self._wait(pid, started + request.wall_ms / 1000)
        if request.collect:
            self._collect(data)
        os.close(data)
        kernel.unmount("/tmp")
        wall_seconds = time.monotonic() - started
        self._control.send(wire.Done(timed_out, status, int(cpu_seconds * 1000), int(wall_seconds * 1000)).pack())

    def _fork(self, request: wire.Request, data: int, output: int, errors: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            self._control.close()
            from tunix_core.sandbox.inside import runner

            runner.confine(request, self._filter)
            runner.begin(request.role, socket.socket(fileno=data), output, errors)
        except BaseException:
            with suppress(OSError):
                os.write(errors, traceback.format_exc().encode("utf-8", "backslashreplace"))
        os._exit(1)

    def _wait(self, pid: int, deadline: float) -> tuple[bool, int, float]:
        """Until the first process ended, time is up, or the pool asks to kill; then nothing of the call runs."""
        process, control = os.pidfd_open(pid), self._control.fileno()
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.register(control, select.POLLIN)
        timed_out = False
        while True:
            left = deadline - time.monotonic()
            events = poll.poll(max(0.0, left * 1000))
            ready = {descriptor for descriptor, _ in events}
            if process in ready:
                break
            if control in ready and self._control.recv(256) == b"":
                os._exit(0)
            if control in ready or left <= 0:
                timed_out = control not in ready
                os.kill(pid, signal.SIGKILL)
                break
        os.close(process)
        _, status, usage = os.wait4(pid, 0)
        _kill_everything()
        return timed_out, status, usage.ru_utime + usage.ru_stime

    def _collect(self, data: int) -> None:
        """By a process of its own: not even the files of a call pass through this one's memory."""
        pid = os.fork()
        if pid == 0:
            try:
                self._control.close()
                from tunix_core.sandbox.inside import collector

                kernel.drop_capabilities()
                self._filter.install()
                collector.collect(socket.socket(fileno=data))
            except BaseException:
                pass
            os._exit(0)
        self._wait(pid, time.monotonic() + _COLLECT_SECONDS)


def main() -> None:
    settings = json.loads(sys.argv[1])
    _prepare()
    from tunix_core.sandbox.inside import checker, collector, runner, submission  # noqa: F401  loaded once, for all calls

    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    _Zygote(socket.socket(fileno=settings["control"]), kernel.Filter(bytes.fromhex(settings["filter"]))).serve()


if __name__ == "__main__":
    main()

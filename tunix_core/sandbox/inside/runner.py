"""The process of one call: gives up what it may, reads its source, runs it as `__main__`."""

from __future__ import annotations

import atexit
import gc
import io
import linecache
import os
import resource
import socket
import stat
import sys
import threading
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tunix_core.sandbox.inside import kernel, wire

EXIT_OUT_OF_MEMORY = 250
"""After an uncaught MemoryError."""
SOURCE_NAME = "main.py"
_FIRST_FREE = 3


def confine(request: wire.Request, seccomp_filter: kernel.Filter) -> None:
    """Limits, no capabilities, the filter. Nothing undoes any of it."""
    os.setsid()
    kernel.limit(resource.RLIMIT_CPU, request.cpu_seconds, request.cpu_seconds + 1)
    kernel.limit(resource.RLIMIT_AS, request.memory_bytes)
    kernel.limit(resource.RLIMIT_NPROC, request.max_processes + 1)  # the zygote counts too
    kernel.limit(resource.RLIMIT_NOFILE, request.open_files)
    kernel.limit(resource.RLIMIT_FSIZE, request.file_bytes)
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
        kernel.limit(kind, 0)
    kernel.drop_capabilities()
    seccomp_filter.install()


def begin(role: wire.Role, data: socket.socket, output: int, errors: int) -> None:
    """Read the payload and run it; does not return."""
    source = wire.from_json(wire.read_frame(data))
    stdin = wire.read_frame(data)
    tree = wire.read_frame(data)
    os.chdir("/tmp/work")
    _restore(tree)
    # The pool's channel is not the call's; a submission and its tests have one to each other, at a fixed place.
    descriptors = [_input(stdin), output, errors]
    if role == "run":
        data.close()
    else:
        descriptors.append(data.detach())
    _lay_out(descriptors)
    _fresh_streams()
    if role == "run":
        finish(lambda: execute(source, main_module()))
    from tunix_core.sandbox.inside import checker, submission

    channel = socket.socket(fileno=_FIRST_FREE)
    if role == "submission":
        finish(lambda: submission.serve(channel, source))
    finish(lambda: checker.check(channel, source))


def _restore(tree: bytes) -> None:
    folders = []
    for entry in wire.unpack_tree(tree):
        if entry.kind == stat.S_IFDIR:
            os.mkdir(entry.path)
            folders.append(entry)
        elif entry.kind == stat.S_IFLNK:
            os.symlink(entry.data, entry.path)
        else:
            with open(entry.path, "xb") as file:
                file.write(entry.data)
            os.chmod(entry.path, entry.mode)
    for entry in reversed(folders):
        os.chmod(entry.path, entry.mode)


def _input(stdin: bytes) -> int:
    """A file without a name, so that its size is nobody's concern and `open(0)` works."""
    if not stdin:
        return os.open("/dev/null", os.O_RDONLY)
    descriptor = os.open("/tmp/stdin", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink("/tmp/stdin")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(stdin)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _lay_out(descriptors: list[int]) -> None:
    """Those as 0, 1, 2, …, and no other open."""
    high = max(*descriptors, len(descriptors)) + 1
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, high + place)
    for place in range(len(descriptors)):
        os.dup2(high + place, place)
    os.closerange(len(descriptors), high + len(descriptors))


def _fresh_streams() -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "r" if number == 0 else "w"
        errors = "backslashreplace" if number == 2 else "surrogateescape"
        raw = io.FileIO(number, mode, closefd=False)
        buffer: Any = io.BufferedReader(raw) if number == 0 else io.BufferedWriter(raw)
        stream = io.TextIOWrapper(buffer, "utf-8", errors, line_buffering=number == 2, write_through=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def main_module() -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv = [SOURCE_NAME]
    sys.path.insert(0, os.getcwd())
    return module


def execute(source: str, module: types.ModuleType) -> None:
    """Run source text in a module; tracebacks show its lines."""
    linecache.cache[SOURCE_NAME] = (len(source), None, source.splitlines(keepends=True), SOURCE_NAME)
    exec(compile(source, SOURCE_NAME, "exec", dont_inherit=True), module.__dict__)


def finish(body: Callable[[], None]) -> None:
    """Run and end as an interpreter of its own would: exit codes, traceback, threads, atexit. Does not return."""
    gc.enable()
    code = 0
    try:
        try:
            body()
        except BaseException as error:
            code = _exit_code(error)
        for last in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
            last()
    except BaseException as error:
        code = _exit_code(error)
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()
    os._exit(code)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        if isinstance(error.code, int):
            return error.code & 0xFF
        _say(f"{error.code}\n")
        return 1
    # The traceback begins in the submitted source, not here.
    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_code.co_filename != SOURCE_NAME:
        shown = shown.tb_next
    with suppress(BaseException):
        _say("".join(traceback.format_exception(type(error), error, shown)))
    return EXIT_OUT_OF_MEMORY if isinstance(error, MemoryError) else 1


def _say(text: str) -> None:
    with suppress(BaseException):
        sys.stderr.write(text)

"""Identity and life of processes on this host.

A pid alone names nothing: it is reused, and it means another process after a reboot or on another
host. A process is `(host, boot id, pid, start time)`, and every signal sent here checks it first.
Reads `/proc`, so Linux only.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """One process, for ever."""

    host: str
    boot_id: str
    pid: int
    pid_start: int
    """Start time in clock ticks since boot."""

    @property
    def is_local(self) -> bool:
        """Whether it was started on this host since it booted last."""
        return self.host == socket.gethostname() and self.boot_id == boot_id()

    def is_alive(self) -> bool:
        """Whether it runs; a zombie does not. False for a process of another host or boot."""
        return self.is_local and pid_start(self.pid) == self.pid_start

    def send(self, signum: int) -> bool:
        """Signal it if it still is the same process."""
        if not self.is_alive():
            return False
        try:
            os.kill(self.pid, signum)
        except ProcessLookupError:
            return False
        return True


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat after the command's name; the first is the state."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def pid_start(pid: int) -> int | None:
    """Start time of a running process in clock ticks since boot; None for none or a zombie."""
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return int(fields[19])


def identify(pid: int) -> ProcessIdentity:
    """Identity of a running process of this host.

    Raises:
        ProcessLookupError: no such process.
    """
    start = pid_start(pid)
    if start is None:
        raise ProcessLookupError(f"no process {pid}")
    return ProcessIdentity(host=socket.gethostname(), boot_id=boot_id(), pid=pid, pid_start=start)


def spawn_detached(
    command: Sequence[str], environment: Mapping[str, str], *, output: Path | None = None, cwd: Path | None = None
) -> int:
    """Start a program in a session of its own that outlives this process; returns its pid.

    Nothing ties it to the caller: no pipe, no inherited file, input and (without `output`) output
    at /dev/null. The caller may ask `has_exited`, and need not.
    """
    target = str(output) if output is not None else os.devnull
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions: list[tuple[Any, ...]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, target, flags, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    program = list(command)
    if cwd is not None:
        program = ["/usr/bin/env", "-C", str(cwd), *program]
    return os.posix_spawn(program[0], program, dict(environment), file_actions=actions, setsid=True)


def has_exited(pid: int) -> bool:
    """Whether a child of this process has ended; reaps it."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def session_members(session: int) -> list[ProcessIdentity]:
    """Running processes of a session. A session's number is not reused while it has members."""
    members = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        fields = _stat(int(entry))
        if fields is not None and fields[0] not in "ZX" and int(fields[3]) == session:
            members.append(
                ProcessIdentity(host=socket.gethostname(), boot_id=boot_id(), pid=int(entry), pid_start=int(fields[19]))
            )
    return members


def wait_until(condition: Callable[[], bool], timeout_seconds: float, interval_seconds: float = 0.05) -> bool:
    """Poll until `condition()` holds; False when the time runs out first."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(interval_seconds)
    return True


def terminate(targets: Iterable[ProcessIdentity], grace_seconds: float) -> list[ProcessIdentity]:
    """SIGTERM, a grace period for all together, SIGKILL; returns those that had to be killed."""
    alive = [p for p in targets if p.send(signal.SIGTERM)]
    wait_until(lambda: not any(p.is_alive() for p in alive), grace_seconds)
    killed = [p for p in alive if p.send(signal.SIGKILL)]
    wait_until(lambda: not any(p.is_alive() for p in killed), 5.0)
    return killed


def free_port() -> int:
    """A port of the loopback address that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

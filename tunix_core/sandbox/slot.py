"""One sandbox of a pool: its process, its socket, and the call that runs in it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tunix_core.sandbox.cgroups import MemoryCgroup
from tunix_core.sandbox.inside import wire
from tunix_core.sandbox.inside.runner import EXIT_OUT_OF_MEMORY
from tunix_core.sandbox.launch import Bubblewrap, SandboxUnavailable, launch_command
from tunix_core.sandbox.limits import SandboxLimits
from tunix_core.sandbox.results import Exit, SandboxResult

_BACKSTOP_SECONDS = 15.0
"""Beyond the wall seconds: the zygote ends a call by itself, and one that has not by then is broken."""
_END_SECONDS = 10.0
_LINGER_SECONDS = 0.5
ZYGOTE_BYTES = 32 << 20
"""Of the memory cgroup's limit: the sandbox's own process."""
MAX_ENTRIES = 4096
"""Files, folders and links of a tree that is handed back."""


class SlotBroken(Exception):
    """The sandbox's process is gone, or said what it never says."""


class Channel:
    """Frames to and from a process of a call, whose bytes are not to be trusted."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    async def send(self, body: bytes) -> None:
        with suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(self._end, wire.frame(body))

    async def receive(self, max_bytes: int = wire.MAX_FRAME_BYTES) -> bytes:
        """
        Raises:
            EOFError: the process closed its end, or it went.
            wire.MalformedMessage: a longer frame.
        """
        return await self.exactly(wire.frame_length(await self.exactly(wire.LENGTH_BYTES), max_bytes))

    async def exactly(self, num_bytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        parts, missing = [], num_bytes
        while missing:
            try:
                part = await loop.sock_recv(self._end, min(missing, 1 << 16))
            except ConnectionError:
                part = b""
            if not part:
                raise EOFError
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


class _Stream:
    """The reading end of a call's stdout or stderr, bounded."""

    def __init__(self, max_bytes: int, on_excess: Callable[[], None]) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._max_bytes, self._on_excess = max_bytes, on_excess
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self.truncated = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reading, self._read)

    def _read(self) -> bool:
        """Whether there may be more."""
        try:
            part = os.read(self._reading, 1 << 16)
        except BlockingIOError:
            return False
        if not part:
            self._loop.remove_reader(self._reading)
            return False
        room = self._max_bytes - self._num_bytes
        if len(part) > room:
            part = part[:room]
            if not self.truncated:
                self.truncated = True
                self._on_excess()
        self._num_bytes += len(part)
        self._parts.append(part)
        return True

    def finish(self) -> str:
        """What came; to be called when no process holds the writing end any more."""
        while not self.truncated and self._read():
            pass
        self._loop.remove_reader(self._reading)
        os.close(self._reading)
        return b"".join(self._parts).decode("utf-8", "replace")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What a slot runs."""

    role: wire.Role
    source: str
    limits: SandboxLimits
    stdin: bytes = b""
    tree: bytes = b""
    collect: tuple[str, ...] | None = None
    """Names; None for nothing, unless `collect_tree`."""
    collect_tree: bool = False
    talk: Callable[[Channel], Awaitable[None]] | None = None
    """Runs beside the call, with its channel; for the roles that have one."""

    @property
    def collects(self) -> bool:
        return self.collect_tree or bool(self.collect)

    def request(self) -> wire.Request:
        limits = self.limits
        return wire.Request(
            self.role,
            self.collects,
            int(limits.wall_seconds * 1000),
            limits.cpu_seconds,
            limits.memory_bytes,
            limits.max_processes,
            limits.open_files,
            limits.file_bytes,
            limits.tmp_bytes,
            limits.tmp_files,
        )

    def payload(self) -> bytes:
        frames = [wire.frame(wire.to_json(self.source)), wire.frame(self.stdin), wire.frame(self.tree)]
        if self.collects:
            names = None if self.collect_tree else list(self.collect or ())
            wanted = {"names": names, "max_bytes": self.limits.returned_bytes, "max_entries": MAX_ENTRIES}
            frames.append(wire.frame(wire.to_json(wanted)))
        return b"".join(frames)


class Slot:
    """A started sandbox. One call at a time; once `broken`, none."""

    def __init__(self, uid: int | None, cgroup: MemoryCgroup | None) -> None:
        self.uid = uid
        self.broken = False
        self._cgroup = cgroup
        self._num_kills = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._done: asyncio.Future[bytes] | None = None

    async def start(self, bubblewrap: Bubblewrap, limits: SandboxLimits, seconds: float) -> None:
        """
        Raises:
            SandboxUnavailable: it did not come up; with what bubblewrap and the kernel said.
        """
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here.setblocking(False)
        self._control = here
        if self._cgroup is not None:
            self._cgroup.limit(limits.memory_bytes + ZYGOTE_BYTES)
        procs = self._cgroup.procs_file if self._cgroup is not None else None
        command = launch_command(bubblewrap, uid=self.uid, cgroup=procs, control=there.fileno())
        with there:
            self._process = subprocess.Popen(
                command,
                pass_fds=(there.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        loop = asyncio.get_running_loop()
        try:
            ready = await asyncio.wait_for(loop.sock_recv(here, 16), seconds)
            problem = "" if ready == wire.READY else "it ended at once"
        except TimeoutError:
            problem = f"it was not ready after {seconds} s"
        except ConnectionError:
            problem = "it ended at once"
        if problem:
            self._process.kill()
            assert self._process.stderr is not None
            os.set_blocking(self._process.stderr.fileno(), True)
            said = self._process.stderr.read(4000).decode("utf-8", "replace").strip()
            raise SandboxUnavailable("sandbox", f"{problem}; it said: {said or 'nothing'}", ACCEPTED, REMEDY)
        loop.add_reader(here.fileno(), self._on_control)

    def _on_control(self) -> None:
        assert self._control is not None
        try:
            message = self._control.recv(256)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message or self._done is None or self._done.done():
            self.broken = True
            asyncio.get_running_loop().remove_reader(self._control.fileno())
        if self._done is not None and not self._done.done():
            self._done.set_result(message)

    def kill_call(self) -> None:
        """End the call that runs now."""
        if self._control is not None and not self.broken:
            with suppress(OSError):
                self._control.send(wire.KILL)

    def _kill_if(self, call: asyncio.Future[bytes]) -> None:
        if self._done is call and not call.done():
            self.kill_call()

    async def call(self, call: Call) -> tuple[SandboxResult, bytes | None]:
        """Run it; the result, and the tree that was asked for. Never raises for what the call does."""
        started = time.monotonic()
        assert self._control is not None
        if self._cgroup is not None:
            self._cgroup.limit(call.limits.memory_bytes + ZYGOTE_BYTES)
        excess: list[bool] = []

        def on_excess() -> None:
            excess.append(True)
            self.kill_call()

        self._done = asyncio.get_running_loop().create_future()
        output, errors = _Stream(call.limits.output_bytes, on_excess), _Stream(call.limits.output_bytes, on_excess)
        data, other = socket.socketpair()
        data.setblocking(False)
        tree: bytes | None = None
        done: wire.Done | None = None
        with data:
            try:
                with other:
                    descriptors = [other.fileno(), output.writing, errors.writing]
                    socket.send_fds(self._control, [call.request().pack()], descriptors)
                    os.close(output.writing)
                    os.close(errors.writing)
                done, tree = await self._exchange(call, data)
            except (SlotBroken, OSError, wire.MalformedMessage):
                self.broken = True
                self._kill()
        texts = output.finish(), errors.finish()
        kind, code = self._ending(call, done, bool(excess), tree is not None)
        result = SandboxResult(
            exit=kind,
            exit_code=code,
            stdout=texts[0],
            stderr=texts[1],
            stdout_truncated=output.truncated,
            stderr_truncated=errors.truncated,
            seconds=time.monotonic() - started,
        )
        return result, tree

    async def _exchange(self, call: Call, data: socket.socket) -> tuple[wire.Done, bytes | None]:
        """Send the payload, talk, take the tree, until the zygote says that the call is over."""
        assert self._done is not None
        work = asyncio.ensure_future(self._converse(call, data, self._done))
        try:
            message = await asyncio.wait_for(self._done, call.limits.wall_seconds + _BACKSTOP_SECONDS)
            if not message:
                raise SlotBroken("the sandbox's process is gone")
            done = wire.Done.unpack(message)
            # All that the process sent is in the socket by now, and then comes its end; a talk ends with its partner's.
            partner_seconds = call.limits.wall_seconds + _BACKSTOP_SECONDS if call.talk is not None else 0.0
            tree = await asyncio.wait_for(work, _END_SECONDS + partner_seconds)
        except TimeoutError:
            raise SlotBroken("a call did not end") from None
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError, EOFError, wire.MalformedMessage):
                await work
        return done, tree

    async def _converse(self, call: Call, data: socket.socket, done: asyncio.Future[bytes]) -> bytes | None:
        channel = Channel(data)
        with suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(data, call.payload())
        if call.talk is not None:
            await call.talk(channel)
            with suppress(OSError):
                data.shutdown(socket.SHUT_WR)
            # Nothing is asked of it any more; what it does at its exit is not waited for.
            asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._kill_if, done)
        if not call.collects:
            return None
        try:
            header = await channel.exactly(wire.COLLECTED_HEADER_BYTES)
            limit = call.limits.returned_bytes + MAX_ENTRIES * (wire.ENTRY_OVERHEAD_BYTES + 4096)
            length = wire.collected_length(header, limit)
            return None if length is None else await channel.exactly(length)
        except EOFError:
            return None

    def _ending(self, call: Call, done: wire.Done | None, excess: bool, has_tree: bool) -> tuple[Exit, int | None]:
        num_kills = self._cgroup.num_kills() if self._cgroup is not None else 0
        killed_for_memory, self._num_kills = num_kills > self._num_kills, num_kills
        if done is None:
            return ("memory" if killed_for_memory else "lost"), None
        code = os.waitstatus_to_exitcode(done.wait_status)
        if excess:
            return "output", code
        if done.timed_out:
            return "timeout", code
        if code == -signal.SIGSYS:
            return "forbidden", code
        out_of_time = done.cpu_ms >= call.limits.cpu_seconds * 1000
        if code == -signal.SIGXCPU or (code == -signal.SIGKILL and out_of_time):
            return "cpu", code
        if code == EXIT_OUT_OF_MEMORY or (code != 0 and killed_for_memory):
            return "memory", code
        if code != 0:
            return ("signal" if code < 0 else "error"), code
        return ("files" if call.collects and not has_tree else "ok"), code

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def end(self) -> None:
        """Kill it with everything inside, and wait until it is gone."""
        self.broken = True
        if self._done is not None and not self._done.done():
            self._done.set_result(b"")
        loop = asyncio.get_running_loop()
        if self._control is not None:
            loop.remove_reader(self._control.fileno())
            self._control.close()
        if self._process is not None:
            self._kill()
            while self._process.poll() is None:
                await asyncio.sleep(0.002)
            assert self._process.stderr is not None
            self._process.stderr.close()
        deadline = time.monotonic() + _END_SECONDS
        while self._cgroup is not None and not self._cgroup.try_remove() and time.monotonic() < deadline:
            await asyncio.sleep(0.005)


ACCEPTED = "a kernel that lets this user make user, pid, mount and network namespaces"
REMEDY = (
    "Outside a container: sysctl kernel.unprivileged_userns_clone=1 and user.max_user_namespaces above 0, and on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0. In a container: allow unshare and mount (seccomp profile, CAP_SYS_ADMIN)."
)

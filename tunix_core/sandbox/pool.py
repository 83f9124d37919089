"""A pool of started sandboxes: calls, sessions whose files persist, and submissions under tests.

Guarantees and what is not guaranteed are in CONTRIBUTING. In short: a call runs in its own process of
a sandbox that nothing else uses at that time, with an empty /tmp; when it ends, everything of it is
killed before the sandbox is used again; and a sandbox that does anything unexpected is replaced.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from tunix_core.errors import ConfigError, EnvironmentFailure
from tunix_core.sandbox import checking, seccomp
from tunix_core.sandbox.cgroups import CgroupParent, CgroupsUnavailable, open_parent
from tunix_core.sandbox.identities import Identities
from tunix_core.sandbox.inside import wire
from tunix_core.sandbox.launch import Bubblewrap, SandboxUnavailable, find_bubblewrap
from tunix_core.sandbox.limits import SandboxConfig, SandboxLimits
from tunix_core.sandbox.results import SandboxResult, Verdict
from tunix_core.sandbox.slot import Call, Slot
from tunix_core.validation import require

_START_PAUSES = (0.0, 0.2, 1.0, 5.0)
"""Before each attempt at replacing a sandbox."""

_OWN_ENTRIES = 4
"""Of /tmp: itself, the working directory, /tmp/shm, the standard input."""


class SandboxLost(EnvironmentFailure):
    """No sandbox could be started any more."""


@dataclasses.dataclass
class PoolCounters:
    """Since the pool was made."""

    calls: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """By exit; `cancelled` are those whose caller was cancelled."""
    num_replaced: int = 0
    """Sandboxes that were discarded, for another."""
    num_missing: int = 0
    """Sandboxes that were discarded and could not be replaced."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The working directory of a session after a call: a value, from which other sessions can go on."""

    tree: bytes = b""

    @property
    def files(self) -> dict[str, bytes]:
        """Regular files by name; names that are no UTF-8 carry surrogates."""
        entries = wire.unpack_tree(self.tree)
        return {os.fsdecode(entry.path): entry.data for entry in entries if entry.kind == stat.S_IFREG}


class SandboxPool:
    """Sandboxes of one process and one event loop. `async with`, or `start` and `close`."""

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self.counters = PoolCounters()
        self._idle: list[Slot] = []
        self._slots: set[Slot] = set()
        self._waiters: collections.deque[asyncio.Future[None]] = collections.deque()
        self._pairs = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._identities = Identities()
        self._bubblewrap: Bubblewrap | None = None
        self._cgroups: CgroupParent | None = None
        self._without_cgroup = "memory cgroups are off"
        self._started = False
        self._closing: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._num_started = 0

    async def start(self) -> None:
        """Start all sandboxes. From the thread whose loop uses them: a sandbox dies with the thread that started it.

        Raises:
            SandboxUnavailable: bubblewrap is missing, or the kernel does not allow what isolation takes.
        """
        require(not self._started, "pool", "started before", "one start", "Make a new pool.")
        self._started = True
        seccomp.architecture()
        self._bubblewrap = find_bubblewrap()
        try:
            self._open_cgroups()
            slots = await asyncio.gather(
                *(self._new_slot() for _ in range(self.config.num_slots)), return_exceptions=True
            )
            for slot in slots:
                if isinstance(slot, BaseException):
                    raise slot
                self._idle.append(slot)
        except BaseException:
            await self.close()
            raise

    def _open_cgroups(self) -> None:
        if self.config.memory_cgroup == "off":
            return
        try:
            self._cgroups = open_parent()
        except CgroupsUnavailable as error:
            self._without_cgroup = str(error)
            if self.config.memory_cgroup == "required":
                raise SandboxUnavailable(
                    "memory_cgroup",
                    str(error),
                    "a memory cgroup (version 1 or 2) that this process may make children in",
                    "Delegate one (systemd: Delegate=memory), or accept memory_cgroup = 'auto'.",
                ) from None

    @property
    def description(self) -> str:
        """What isolates, and which limits hold, in one line for a log."""
        limits = self.config.limits
        mib = limits.memory_bytes >> 20
        if self._cgroups is not None:
            memory = f"memory cgroup version {self._cgroups.version}: {mib} MiB per call in total"
        else:
            memory = (
                f"no memory cgroup ({self._without_cgroup}): {mib} MiB of address space for each of "
                f"{limits.max_processes} processes"
            )
        return f"bubblewrap, {self.config.num_slots} sandboxes, seccomp allow-list, {self._identities.description}; {memory}"

    async def _new_slot(self) -> Slot:
        assert self._bubblewrap is not None
        self._num_started += 1
        cgroup = self._cgroups.slot(f"slot-{self._num_started}") if self._cgroups is not None else None
        slot = Slot(self._identities.take(), cgroup)
        self._slots.add(slot)
        try:
            await slot.start(self._bubblewrap, self.config.limits, self.config.start_seconds)
        except BaseException:
            await self._end(slot)
            raise
        return slot

    async def _end(self, slot: Slot) -> None:
        await slot.end()
        self._slots.discard(slot)
        self._identities.give_back(slot.uid)

    async def _acquire(self) -> Slot:
        while True:
            require(self._started and not self._closed, "pool", "not open", "an open pool", "Call start, before close.")
            while self._idle:
                slot = self._idle.pop()
                if not slot.broken:
                    return slot
                self._in_background(self._replace(slot))
            if self.counters.num_missing == self.config.num_slots:
                raise SandboxLost(f"no sandbox could be started any more: {self._failure}")
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake()  # what it was woken for is another's
                raise
            finally:
                with suppress(ValueError):
                    self._waiters.remove(waiter)

    def _wake(self, *, everyone: bool = False) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                if not everyone:
                    return

    def _release(self, slot: Slot) -> None:
        if slot.broken or self._closed:
            self._in_background(self._replace(slot))
        else:
            self._idle.append(slot)
            self._wake()

    async def _replace(self, slot: Slot) -> None:
        await self._end(slot)
        for pause in _START_PAUSES:
            if self._closed:
                return
            await asyncio.sleep(pause)
            try:
                fresh = await self._new_slot()
            except (ConfigError, OSError) as error:
                self._failure = error
            else:
                self.counters.num_replaced += 1
                self._release(fresh)
                return
        self.counters.num_missing += 1
        self._wake(everyone=True)

    def _in_background(self, work: collections.abc.Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, slot: Slot, call: Call) -> tuple[SandboxResult, bytes | None]:
        """In a slot that is given back however this ends. A cancelled caller does not wait for the kill."""
        work = asyncio.ensure_future(slot.call(call))
        try:
            result, tree = await asyncio.shield(work)
        except asyncio.CancelledError:
            self.counters.calls["cancelled"] += 1
            slot.kill_call()
            self._in_background(self._release_after(work, slot))
            raise
        except BaseException:
            slot.broken = True
            self._release(slot)
            raise
        self.counters.calls[result.exit] += 1
        self._release(slot)
        return result, tree

    async def _release_after(self, work: asyncio.Future[tuple[SandboxResult, bytes | None]], slot: Slot) -> None:
        with suppress(Exception):
            await work
        self._release(slot)

    async def run(
        self,
        source: str,
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: str = "",
        limits: SandboxLimits | None = None,
        collect: Sequence[str] = (),
    ) -> SandboxResult:
        """Run a program as `__main__` in an empty working directory of its own.

        Args:
            files: to find there, by relative names; folders are made.
            collect: names of files to hand back, those that are there at the end.

        Raises:
            ConfigError: a name is absolute or holds dots, or the files are more than /tmp holds.
            SandboxLost: no sandbox can be started any more.
        """
        limits = limits or self.config.limits
        tree = _tree_of(files or {}, stdin, limits)
        for name in collect:
            _check_name("collect", name)
        call = Call(role="run", source=source, limits=limits, stdin=_bytes_of(stdin), tree=tree, collect=tuple(collect))
        result, returned = await self._run(await self._acquire(), call)
        if returned is None:
            return result
        return dataclasses.replace(result, files=Snapshot(returned).files)

    def session(
        self,
        *,
        files: Mapping[str, bytes] | None = None,
        snapshot: Snapshot | None = None,
        limits: SandboxLimits | None = None,
    ) -> SandboxSession:
        """A working directory that persists from call to call. It costs no process between calls."""
        require(files is None or snapshot is None, "session", "files and a snapshot", "one of them", "Leave one out.")
        limits = limits or self.config.limits
        return SandboxSession(self, snapshot or Snapshot(_tree_of(files or {}, "", limits)), limits)

    async def check(
        self, submission: str, *, tests: Mapping[str, str], setup: str = "", limits: SandboxLimits | None = None
    ) -> Verdict:
        """Run tests against a submission, in two sandboxes: see `tunix_core.sandbox.checking`.

        Args:
            tests: source text by name. A test passes when it runs to its end; what the submission defines are names there.
            setup: source text that runs once, before the tests, where they run.
            limits: of each of the two processes; the wall seconds are for all tests together.

        Raises:
            ConfigError: the pool has one sandbox only.
            SandboxLost: no sandbox can be started any more.
        """
        require(
            self.config.num_slots >= 2, "num_slots", self.config.num_slots, "2 or more", "Tests need a sandbox too."
        )
        exchange = checking.Exchange(submission, tests, setup, limits or self.config.limits)
        async with self._pairs:  # two callers that hold one sandbox each would wait for ever
            first = await self._acquire()
            try:
                second = await self._acquire()
            except BaseException:
                self._release(first)
                raise
        ended, checked = await asyncio.gather(
            self._run_side(first, exchange, exchange.submission), self._run_side(second, exchange, exchange.checker)
        )
        return exchange.verdict(ended, checked)

    async def _run_side(self, slot: Slot, exchange: checking.Exchange, call: Call) -> SandboxResult:
        try:
            return (await self._run(slot, call))[0]
        finally:
            if call is exchange.checker:
                exchange.end()

    @property
    def _closed(self) -> bool:
        return self._closing is not None

    async def close(self) -> None:
        """Kill what runs and end every sandbox. Who is cancelled meanwhile, or calls again, waits for that all the same."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            await asyncio.wait([self._closing])  # a moment: nothing of it waits for a program
            raise

    async def _close(self) -> None:
        self._wake(everyone=True)
        self._idle.clear()
        await asyncio.gather(*(self._end(slot) for slot in list(self._slots)))
        while self._tasks:
            tasks = list(self._tasks)
            await asyncio.gather(*tasks, return_exceptions=True)
            self._tasks.difference_update(tasks)  # where all were done already, their callbacks have not run yet
        if self._cgroups is not None:
            self._cgroups.remove()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class SandboxSession:
    """The working directory of one episode.

    Between calls it is a value in this process, not a process: a call gets a copy in an empty sandbox and what
    it leaves is read back once everything of it is dead. So no session can reach another, and one outlives its sandbox.
    """

    def __init__(self, pool: SandboxPool, snapshot: Snapshot, limits: SandboxLimits) -> None:
        self._pool = pool
        self._snapshot = snapshot
        self._limits = limits
        self._one_at_a_time = asyncio.Lock()

    @property
    def files(self) -> Mapping[str, bytes]:
        """Regular files as after the last call."""
        return self._snapshot.files

    def snapshot(self) -> Snapshot:
        return self._snapshot

    async def run(self, source: str, *, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxResult:
        """Run a program there. Where its files cannot be kept, those from before it stay: exit `files`, or `lost`."""
        limits = limits or self._limits
        async with self._one_at_a_time:
            call = Call(
                role="run",
                source=source,
                limits=limits,
                stdin=_bytes_of(stdin),
                tree=self._snapshot.tree,
                collect_tree=True,
            )
            result, tree = await self._pool._run(await self._pool._acquire(), call)
            if tree is not None:
                self._snapshot = _checked(tree)
            return result


def _checked(tree: bytes) -> Snapshot:
    collections.deque(wire.unpack_tree(tree), maxlen=0)
    return Snapshot(tree)


def _bytes_of(stdin: str) -> bytes:
    return stdin.encode("utf-8", "surrogatepass")


def _check_name(field: str, name: str) -> bytes:
    try:
        path = os.fsencode(name)
        wire.check_path(path)
    except (wire.MalformedMessage, UnicodeEncodeError):
        raise ConfigError(field, name, "relative paths without dots", "Name a file of the working directory.") from None
    return path


def _tree_of(files: Mapping[str, bytes], stdin: str, limits: SandboxLimits) -> bytes:
    """Files and the folders that they need, parents first."""
    sizes = [len(_bytes_of(stdin)), *(len(content) for content in files.values())]
    size = sum(sizes)
    largest = max(sizes)
    require(
        largest <= limits.file_bytes, "files", f"{largest} bytes", f"up to {limits.file_bytes}", "Raise file_bytes."
    )
    require(size <= limits.tmp_bytes, "files", f"{size} bytes", f"up to {limits.tmp_bytes}", "Raise tmp_bytes.")
    entries: dict[bytes, wire.Entry] = {}
    for name, content in files.items():
        path = _check_name("files", name)
        parts = path.split(b"/")
        for depth in range(1, len(parts)):
            folder = b"/".join(parts[:depth])
            entries.setdefault(folder, wire.Entry(stat.S_IFDIR, 0o755, folder))
        require(path not in entries, "files", name, "a file or a folder of that name", "Rename one.")
        entries[path] = wire.Entry(stat.S_IFREG, 0o644, path, bytes(content))
    room = limits.tmp_files - _OWN_ENTRIES
    require(len(entries) <= room, "files", f"{len(entries)} files and folders", f"up to {room}", "Raise tmp_files.")
    folders = [entry for entry in entries.values() if entry.kind == stat.S_IFDIR]
    return b"".join(wire.pack_entry(entry) for entry in [*folders, *(e for e in entries.values() if e not in folders)])

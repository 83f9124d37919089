"""Memory cgroups of a pool's slots, version 1 or 2, near the cgroup that this process is in already.

Version 1: below it, so that what bounds this process bounds its sandboxes too. Version 2 has processes
in leaves only, so they go beside it, where its parent hands the memory controller down and we may write
(systemd: `Delegate=memory` with `DelegateSubgroup=`); or below it where it is the root of all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from pathlib import Path

from tunix_core.processes import pid_start

_PREFIX = "tunix-sandbox"


class CgroupsUnavailable(OSError):
    """No memory cgroup can be made here."""


class MemoryCgroup:
    """Of one slot: everything in it together stays below a limit that may change from call to call."""

    def __init__(self, folder: Path, version: int) -> None:
        self._folder = folder
        self._version = version
        self._limit: int | None = None
        folder.mkdir()

    @property
    def procs_file(self) -> str:
        return str(self._folder / "cgroup.procs")

    def limit(self, num_bytes: int) -> None:
        if num_bytes == self._limit:
            return
        if self._version == 1:
            # Where swap is accounted too it must not be a way around; its limit may never be the lower one.
            with contextlib.suppress(OSError):
                (self._folder / "memory.memsw.limit_in_bytes").write_text("-1")
            (self._folder / "memory.limit_in_bytes").write_text(str(num_bytes))
            with contextlib.suppress(OSError):
                (self._folder / "memory.memsw.limit_in_bytes").write_text(str(num_bytes))
        else:
            (self._folder / "memory.max").write_text(str(num_bytes))
            with contextlib.suppress(OSError):
                (self._folder / "memory.swap.max").write_text("0")
        self._limit = num_bytes

    def num_kills(self) -> int:
        """Processes that were killed for memory."""
        name = "memory.oom_control" if self._version == 1 else "memory.events"
        found = re.search(r"^oom_kill (\d+)$", (self._folder / name).read_text(), re.MULTILINE)
        return int(found[1]) if found else 0

    def try_remove(self) -> bool:
        """Whether it is gone: not while the kernel still counts a process in it."""
        try:
            self._folder.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


class CgroupParent:
    """The cgroup of a pool, in which each slot has its own."""

    def __init__(self, folder: Path, version: int) -> None:
        """
        Raises:
            CgroupsUnavailable: not writable.
        """
        self.version = version
        _sweep(folder)
        self._folder = folder / f"{_PREFIX}-{os.getpid()}-{pid_start(os.getpid())}-{time.monotonic_ns()}"
        try:
            self._folder.mkdir()
            if version == 2:
                if "memory" not in (folder / "cgroup.subtree_control").read_text().split():
                    raise OSError(errno.EOPNOTSUPP, "its cgroup.subtree_control has no memory controller")
                (self._folder / "cgroup.subtree_control").write_text("+memory")
            probe = MemoryCgroup(self._folder / "probe", version)
            try:
                probe.limit(64 << 20)
                probe.num_kills()
            finally:
                probe.try_remove()
        except OSError as error:
            with contextlib.suppress(OSError):
                self._folder.rmdir()
            raise CgroupsUnavailable(f"{folder}: {error.strerror or error}") from None

    def slot(self, name: str) -> MemoryCgroup:
        return MemoryCgroup(self._folder / name, self.version)

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._folder.rmdir()


def _sweep(folder: Path) -> None:
    """Remove what pools of processes that were killed have left: empty cgroups, nothing else."""
    for left in folder.glob(f"{_PREFIX}-*-*-*"):
        _, _, pid, start, _ = left.name.split("-")
        if pid.isdigit() and str(pid_start(int(pid))) != start:
            for inner in [*left.glob("*/"), left]:
                with contextlib.suppress(OSError):
                    inner.rmdir()


def open_parent(own: str | None = None, mounts: str | None = None) -> CgroupParent:
    """A cgroup below this process's own.

    Args:
        own: text of /proc/self/cgroup.
        mounts: text of /proc/self/mountinfo.

    Raises:
        CgroupsUnavailable: with everything that was tried.
    """
    own = Path("/proc/self/cgroup").read_text() if own is None else own
    mounts = Path("/proc/self/mountinfo").read_text() if mounts is None else mounts
    tried = []
    for version, folder in _candidates(own, mounts):
        try:
            return CgroupParent(folder, version)
        except CgroupsUnavailable as error:
            tried.append(f"version {version} at {error}")
    raise CgroupsUnavailable("; ".join(tried) or "no cgroup hierarchy with a memory controller is mounted")


def _candidates(own: str, mounts: str) -> list[tuple[int, Path]]:
    """(version, folder) of this process's cgroup in each hierarchy that can have a memory controller."""
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in own.splitlines())}
    found = []
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup" and "memory" in options.split(","):
            path = next((path for names, path in paths.items() if "memory" in names.split(",")), None)
            version = 1
        elif kind == "cgroup2":
            path, version = paths.get(""), 2
        else:
            continue
        if path is not None:
            # In a container the mount shows a part of the hierarchy, from `root` on.
            inside = os.path.relpath(path, root) if path.startswith(root) else "."
            folder = Path(os.path.normpath(Path(point) / inside))
            found.append((version, folder))
            if version == 2 and folder != Path(point):
                found.append((version, folder.parent))
    return sorted(found)

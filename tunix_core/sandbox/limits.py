"""What a call may use, and how a pool of sandboxes is made."""

from __future__ import annotations

import dataclasses
from typing import Literal

from tunix_core.validation import require, require_choice, require_range

MemoryCgroup = Literal["auto", "required", "off"]

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What one call may use. Threads count as processes; what is above a limit fails or ends the call."""

    wall_seconds: float = 5.0
    """From the call's start to its end, its set-up included; then everything in it is killed."""
    cpu_seconds: int = 5
    """Of one process; all of them together are bounded by the wall seconds and the machine's CPUs."""
    memory_bytes: int = 256 * _MIB
    """Address space of one process, and with a memory cgroup also everything of the call together."""
    max_processes: int = 16
    open_files: int = 64
    file_bytes: int = 8 * _MIB
    """Of one file that the call writes."""
    tmp_bytes: int = 16 * _MIB
    """Of /tmp as a whole, the files that the call was given included."""
    tmp_files: int = 1024
    """Files, folders and links in /tmp."""
    output_bytes: int = 64 * 1024
    """Of stdout and of stderr, each; the call is ended at the first byte above it."""
    returned_bytes: int = 4 * _MIB
    """Of all files that are handed back, or kept by a session."""

    def __post_init__(self) -> None:
        require_range("wall_seconds", self.wall_seconds, 0.05, 3600.0)
        require_range("cpu_seconds", self.cpu_seconds, 1, 3600)
        require_range("memory_bytes", self.memory_bytes, 64 * _MIB, 1 << 40, "Python itself needs some 40 MiB.")
        require_range("max_processes", self.max_processes, 1, 1024)
        require_range("open_files", self.open_files, 16, 4096)
        require_range("file_bytes", self.file_bytes, 0, 1 << 40)
        require_range("tmp_bytes", self.tmp_bytes, 64 * 1024, 1 << 40)
        require_range("tmp_files", self.tmp_files, 16, 1 << 20)
        require_range("output_bytes", self.output_bytes, 0, 64 * _MIB)
        require_range("returned_bytes", self.returned_bytes, 0, 256 * _MIB)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """A pool of sandboxes of this process."""

    num_slots: int = 4
    """Calls that run at the same time; a slot is an idle process of some 10 MiB."""
    limits: SandboxLimits = dataclasses.field(default_factory=SandboxLimits)
    """Of calls that bring none of their own."""
    memory_cgroup: MemoryCgroup = "auto"
    """`required` refuses to start where no cgroup is writable; `auto` then bounds processes times address space."""
    start_seconds: float = 30.0
    """A sandbox that is not ready by then counts as failed."""

    def __post_init__(self) -> None:
        require_range("num_slots", self.num_slots, 1, 200)
        require_choice("memory_cgroup", self.memory_cgroup, MemoryCgroup)
        require_range("start_seconds", self.start_seconds, 0.1, 600.0)
        require(
            isinstance(self.limits, SandboxLimits), "limits", self.limits, "a SandboxLimits", "Build one by keywords."
        )

"""What comes back from a sandboxed call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, Protocol

from tunix_core.sandbox.limits import SandboxLimits

Exit = Literal["ok", "error", "signal", "timeout", "cpu", "memory", "output", "forbidden", "files", "lost"]
"""How a call ended.

- `ok`: exit code 0. `error`: another one; an uncaught exception is 1.
- `signal`: a signal ended it, for instance a segmentation fault.
- `timeout`: the wall seconds; `cpu`: the CPU seconds of its first process; `output`: too many bytes on a stream.
- `memory`: the memory cgroup's limit, or an uncaught MemoryError.
- `forbidden`: it made a system call that no program of ours needs and that attacks use (seccomp killed it).
- `files`: it ended with exit code 0, but the files to hand back are more than `returned_bytes`, or not to be had.
- `lost`: the sandbox itself went; it has been replaced, and the call may be made again.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """One call. All of it except `exit` other than ok/error, and `seconds`, is the untrusted code's own word."""

    exit: Exit
    exit_code: int | None
    """Minus the signal's number after a signal; None where the sandbox went or no process was involved."""
    stdout: str
    """Decoded with replacement of what is no UTF-8."""
    stderr: str
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    seconds: float = 0.0
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    """Those asked for that were regular files at the end, by the names they were asked for by."""

    @property
    def ok(self) -> bool:
        return self.exit == "ok"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TestOutcome:
    """One test of a submission."""

    __test__ = False  # pytest

    passed: bool
    message: str = ""
    """Why it did not pass: the exception's type and text, bounded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """All tests of a submission."""

    tests: Mapping[str, TestOutcome]
    """Every test that was given, in the order given; one that was not reached has not passed."""
    submission: SandboxResult
    """The process of the untrusted code: how it ended, and what it printed."""
    checker: SandboxResult
    """The process of the tests; `exit` other than ok means that the tests could not be run to their end."""

    @property
    def num_passed(self) -> int:
        return sum(outcome.passed for outcome in self.tests.values())

    @property
    def passed(self) -> bool:
        """Whether every test passed, and there was one."""
        return 0 < len(self.tests) == self.num_passed


class Sandbox(Protocol):
    """What `open_sandbox` gives, whatever isolates."""

    @property
    def description(self) -> str:
        """What isolates, and which limits hold, in one line for a log."""
        ...

    async def run(self, source: str, *, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxResult: ...

    async def close(self) -> None: ...

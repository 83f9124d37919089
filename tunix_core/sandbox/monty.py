"""Small programs in Monty, an interpreter of its own for a part of Python, in worker processes of that package.

What it isolates by: the interpreter has no files, network, processes or modules of CPython to reach.
That is another promise than a kernel's, so it is chosen by name and never in the other's place.

The package's blocking interface on threads of ours: threads that its asynchronous one starts still run
when the interpreter ends, and crash the process there now and then (1.4.0, Python 3.11). Values do not
come back, only text: converting and printing them here would cost what the program likes.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tunix_core.errors import ConfigError
from tunix_core.sandbox.limits import SandboxConfig, SandboxLimits
from tunix_core.sandbox.results import Exit, SandboxResult
from tunix_core.validation import require, require_package

_GRACE_SECONDS = 1.0
"""For a worker to stop by itself, before it is killed."""
_FLUSH_SECONDS = 0.05
_MAX_TRACEBACK_CHARACTERS = 20_000


class _Output:
    """Both streams, each bounded. The worker goes on after the first byte above, and what it prints is dropped."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._streams: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        self._room = {"stdout": max_bytes, "stderr": max_bytes}
        self.truncated: set[str] = set()

    def add(self, stream: str, text: str) -> None:
        part = text.encode("utf-8", "surrogatepass")
        room = self._room[stream]
        self._streams[stream].append(part[:room])
        self._room[stream] -= len(part[:room])
        if len(part) > room:
            self.truncated.add(stream)

    def __call__(self, stream: str, text: str) -> None:
        self.add(stream, text)
        if self.truncated:
            raise ValueError("too much output")

    def text(self, stream: str) -> str:
        return b"".join(self._streams[stream]).decode("utf-8", "replace")


class MontySandbox:
    """`run` as the pool's; of the limits it knows wall seconds, memory and output, the others have no meaning there."""

    def __init__(self, config: SandboxConfig) -> None:
        """
        Raises:
            ConfigError: the package is not installed.
        """
        require_package("pydantic_monty", "monty")
        self._package: Any = importlib.import_module("pydantic_monty")
        self._config = config
        self._threads = ThreadPoolExecutor(config.num_slots, "monty")
        self._workers: Any = None

    async def start(self) -> None:
        """
        Raises:
            ConfigError: the package's program is missing.
        """
        await asyncio.get_running_loop().run_in_executor(self._threads, self._start)

    def _start(self) -> None:
        grace = {"feed_duration_limit_grace": _GRACE_SECONDS, "turn_duration_limit_grace": _GRACE_SECONDS}
        try:
            self._workers = self._package.Monty(max_processes=self._config.num_slots, **grace)
            self._workers.__enter__()
        except (OSError, RuntimeError) as error:
            remedy = "Install it: pip install 'tunix-airflow[monty]'."
            raise ConfigError("environment", str(error), "pydantic-monty with its program monty", remedy) from None

    async def close(self) -> None:
        """Waits for calls that still run, at most their wall seconds."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._workers.__exit__, None, None, None)
        self._threads.shutdown()

    @property
    def description(self) -> str:
        limits = self._config.limits
        return f"monty interpreter, {self._config.num_slots} workers; heap of {limits.memory_bytes >> 20} MiB per call"

    async def run(self, source: str, *, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxResult:
        """Run a program, of which what it prints comes back. A cancelled call, or one that prints too much, goes on
        to its end or its wall seconds: the package has no way to stop it sooner.

        Raises:
            ConfigError: there is input, which Monty has no way to read.
        """
        require(not stdin, "stdin", f"{len(stdin)} characters", "none", "Monty reads no input: use 'bubblewrap'.")
        limits = limits or self._config.limits
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, source, limits)

    def _run(self, source: str, limits: SandboxLimits) -> SandboxResult:
        output = _Output(limits.output_bytes)
        started = time.monotonic()
        bounds = {
            "max_feed_duration_secs": limits.wall_seconds,
            "max_total_sleep_secs": limits.wall_seconds,
            "max_memory": limits.memory_bytes,
        }
        kind: Exit = "ok"
        try:
            with self._workers.checkout(limits=bounds, print_flush_interval=_FLUSH_SECONDS) as session:
                session.feed_run(f"{source}\nNone", print_callback=output)
        except self._package.MontyCrashedError:
            kind = "lost"
        except self._package.MontyError as error:
            kind = _kind(error.exception())
            if kind == "error" and not output.truncated:
                shown = error.display() if hasattr(error, "display") else str(error)
                output.add("stderr", f"{shown[:_MAX_TRACEBACK_CHARACTERS]}\n")
        except UnicodeEncodeError as error:  # text that is no Unicode
            kind = "error"
            output.add("stderr", f"{error}\n")
        if output.truncated:
            kind = "output"
        return SandboxResult(
            exit=kind,
            exit_code={"ok": 0, "error": 1}.get(kind),
            stdout=output.text("stdout"),
            stderr=output.text("stderr"),
            stdout_truncated="stdout" in output.truncated,
            stderr_truncated="stderr" in output.truncated,
            seconds=time.monotonic() - started,
        )


def _kind(raised: BaseException) -> Exit:
    """By Monty's own words for its limits; a program may raise the same, of its own accord."""
    if isinstance(raised, TimeoutError) and "limit exceeded" in str(raised):
        return "timeout"
    return "memory" if isinstance(raised, MemoryError) else "error"

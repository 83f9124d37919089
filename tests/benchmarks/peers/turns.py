"""How contestants take turns. Standard library only: a peer's environment has none of our packages.

A contestant is a process that reads the work from a folder, warms up, says that it is ready, and then
does the whole work once (an update over a batch, the answers to all requests) for every line it reads. It computes nothing in between, so the
others have the machine to themselves. Answers are JSON lines; whatever else it prints goes to its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any


def serve(
    update: Callable[[], Mapping[str, Any]],
    about: Mapping[str, Any],
    warm_up: Callable[[], Mapping[str, Any]] | None = None,
) -> None:
    """The contestant's side. `update` does the work once, from host arrays to a result it has waited for.

    Args:
        update: what is measured; its answer goes back as it is, e.g. `loss`.
        about: said once, e.g. versions and how the batch was laid out.
        warm_up: done before and not measured; by default an update.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # anyone who prints talks to the log
    warmed = (warm_up or update)()
    answers.write(json.dumps({**about, "warm_up": dict(warmed)}) + "\n")
    for line in sys.stdin:
        if line.strip() != "measure":
            break
        started, cpu_started = time.perf_counter(), time.process_time()
        answer = dict(update())
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        answers.write(json.dumps({**answer, "seconds": seconds, "cpu_seconds": cpu_seconds}) + "\n")


class ContestantFailed(Exception):
    """It ended, or answered something else; the message has the end of its log."""


class Contestant:
    """The benchmark's side of one contestant; a context manager that ends the process."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._log = tempfile.NamedTemporaryFile(mode="w+", prefix="contestant-", suffix=".log")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def about(self) -> dict[str, Any]:
        """Waits until it is warm."""
        return self._answer()

    def measure(self) -> dict[str, Any]:
        """One update: `seconds`, `cpu_seconds` and what the contestant adds."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("measure\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its log says why, below
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            text = Path(self._log.name).read_text()
            raise ContestantFailed(f"{self.name}: ended with {self._process.returncode}. Its log ends:\n{text[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Contestant:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


def take_turns(contestants: Sequence[Contestant], num_rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Each measures once a round; the order turns from round to round, so that none always follows the same."""
    answers: dict[str, list[dict[str, Any]]] = {contestant.name: [] for contestant in contestants}
    for turn in range(num_rounds):
        shift = turn % len(contestants)
        for contestant in [*contestants[shift:], *contestants[:shift]]:
            answers[contestant.name].append(contestant.measure())
    return answers

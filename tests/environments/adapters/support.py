"""Playing episodes, and the OpenEnv server that tests talk to."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tunix_core.environment_config import EnvironmentConfig, EnvironmentOptions
from tunix_core.environments import make_environment
from tunix_core.environments.base import Environment, Observation, StepResult
from tunix_core.processes import free_port

ROOT = Path(__file__).parents[3]

Policy = Callable[[Sequence[str]], str]
"""What was read so far, the opening first -> the next message."""


def made(name: str, options: EnvironmentOptions) -> Environment:
    return make_environment(EnvironmentConfig(name=name, options=options, latency_mean_seconds=0.0))


async def play(environment: Environment, seed: int, policy: Policy) -> tuple[Observation, list[StepResult]]:
    """One episode, at most 50 messages; closes."""
    try:
        first = await environment.reset(seed)
        read, results = [first.text], []
        while not (results and results[-1].done) and len(results) < 50:
            results.append(await environment.step(policy(read)))
            read.append(results[-1].text)
        return first, results
    finally:
        await environment.close()


def say(*messages: str) -> Policy:
    """These messages, whatever is read."""
    return lambda read: messages[len(read) - 1]


def play_all(environment: Environment, seed: int, *messages: str) -> tuple[Observation, list[StepResult]]:
    async def go() -> tuple[Observation, list[StepResult]]:
        try:
            first = await environment.reset(seed)
            return first, [await environment.step(message) for message in messages]
        finally:
            await environment.close()

    return asyncio.run(go())


def guesses(low: int, high: int, form: str) -> Policy:
    """Binary search for a number by "higher" and "lower", each guess written as `form` has it."""

    def policy(read: Sequence[str]) -> str:
        first, last = low, high
        for text in read[1:]:
            middle = (first + last) // 2
            if "higher" in text:
                first = middle + 1
            elif "lower" in text:
                last = middle - 1
        return form.format((first + last) // 2)

    return policy


@contextlib.contextmanager
def openenv_server(sessions: int = 128) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server process on loopback; gives its address and the process."""
    port = free_port()
    module = "tests.environments.adapters.openenv_server"
    with subprocess.Popen([sys.executable, "-m", module, str(port), str(sessions)], cwd=ROOT) as process:
        try:
            _await_health(process, port)
            yield f"ws://127.0.0.1:{port}", process
        finally:
            process.kill()


def _await_health(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended"
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health"),
        ):
            return
        time.sleep(0.1)
    raise AssertionError("the server did not start")

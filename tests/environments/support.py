"""Environments for tests, and a sandbox that is none: it runs code of these tests in this process."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

from tunix_core.environment_config import EnvironmentConfig
from tunix_core.environments import Environment, Observation, StepResult, make_environment
from tunix_core.environments.python import PythonProgramming
from tunix_core.sandbox.limits import SandboxLimits
from tunix_core.sandbox.results import SandboxResult, TestOutcome, Verdict


class InProcess:
    """See `environments.sandboxes.CodeSandbox`; `losses` checks are answered by a lost sandbox first."""

    def __init__(self, losses: int = 0) -> None:
        self.losses = losses
        self.tests: list[Mapping[str, str]] = []

    async def run(self, source: str, *, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxResult:
        del stdin
        assert limits is not None
        return self._run(source, {"__name__": "__main__"})

    async def check(
        self, submission: str, *, tests: Mapping[str, str], setup: str = "", limits: SandboxLimits | None = None
    ) -> Verdict:
        assert limits is not None
        self.tests.append(tests)
        lost = SandboxResult(exit="lost", exit_code=None, stdout="", stderr="")
        if self.losses:
            self.losses -= 1
            return Verdict(tests={name: TestOutcome(passed=False) for name in tests}, submission=lost, checker=lost)
        scope: dict[str, Any] = {}
        ran = self._run(submission, scope)
        exec(setup, scope)
        passed = {name: TestOutcome(passed=self._run(test, scope).ok) for name, test in tests.items()}
        return Verdict(tests=passed, submission=ran, checker=ran)

    def _run(self, source: str, scope: dict[str, Any]) -> SandboxResult:
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                exec(source, scope)
        except Exception as error:
            return SandboxResult(
                exit="error", exit_code=1, stdout=out.getvalue(), stderr=f"{type(error).__name__}: {error}"
            )
        return SandboxResult(exit="ok", exit_code=0, stdout=out.getvalue(), stderr="")


class ScriptedSandboxes:
    """See `environments.sandboxes.Sandboxes`."""

    def __init__(self, sandbox: InProcess | None = None) -> None:
        self.sandbox = sandbox or InProcess()
        self.num_held = 0

    async def acquire(self) -> InProcess:
        self.num_held += 1
        return self.sandbox

    async def release(self) -> None:
        self.num_held -= 1


def config(name: str, **fields: Any) -> EnvironmentConfig:
    return EnvironmentConfig(**{"name": name, "latency_mean_seconds": 0.0, **fields})


def made(name: str, **fields: Any) -> Any:
    """An environment without latency; `python` without a sandbox."""
    if name == "python":
        return PythonProgramming(config(name, **fields), sandboxes=ScriptedSandboxes())
    return make_environment(config(name, **fields))


def play(environment: Environment, seed: int, messages: Sequence[str]) -> tuple[Observation, list[StepResult]]:
    """An episode; messages after its end are left out."""

    async def go() -> tuple[Observation, list[StepResult]]:
        try:
            first, results = await environment.reset(seed), []
            for message in messages:
                results.append(await environment.step(message))
                if results[-1].done:
                    break
            return first, results
        finally:
            await environment.close()

    return asyncio.run(go())

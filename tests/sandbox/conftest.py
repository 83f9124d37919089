"""One pool per module, driven from ordinary test functions."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from tunix_core.sandbox.limits import SandboxConfig, SandboxLimits
from tunix_core.sandbox.pool import SandboxPool
from tunix_core.sandbox.results import SandboxResult

T = TypeVar("T")

QUICK = SandboxLimits(wall_seconds=20.0, memory_bytes=160 << 20)
"""Wall seconds that a loaded machine does not reach."""


class Sandboxes:
    """A pool, and the loop that it lives on."""

    def __init__(self, runner: asyncio.Runner, config: SandboxConfig) -> None:
        self.pool = SandboxPool(config)
        self._runner = runner

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def settle(self) -> None:
        """Wait until every sandbox is there and idle."""

        async def idle() -> None:
            while len(self.pool._idle) < self.pool.config.num_slots or any(slot.broken for slot in self.pool._idle):
                await asyncio.sleep(0.01)

        self.wait(asyncio.wait_for(idle(), 240.0))

    def run(self, source: str, **options: Any) -> SandboxResult:
        return self.wait(self.pool.run(source, **options))


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[Sandboxes]:
    with asyncio.Runner() as runner:
        made = Sandboxes(runner, SandboxConfig(num_slots=2, limits=QUICK))
        runner.run(made.pool.start())
        yield made
        runner.run(made.pool.close())

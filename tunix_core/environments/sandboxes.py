"""The sandboxes of a process: made when the first episode needs them, gone with the last."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Protocol

from tunix_core.sandbox.limits import SandboxConfig, SandboxLimits
from tunix_core.sandbox.pool import SandboxPool
from tunix_core.sandbox.results import SandboxResult, Verdict


class CodeSandbox(Protocol):
    """What environments take of a `SandboxPool`."""

    async def run(self, source: str, *, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxResult: ...

    async def check(
        self, submission: str, *, tests: Mapping[str, str], setup: str = "", limits: SandboxLimits | None = None
    ) -> Verdict: ...


class Sandboxes(Protocol):
    """Where an episode takes a sandbox from."""

    async def acquire(self) -> CodeSandbox: ...

    async def release(self) -> None: ...


@dataclasses.dataclass
class _Shared:
    pool: SandboxPool
    starting: asyncio.Task[None]
    num_users: int = 0


_shared: dict[tuple[asyncio.AbstractEventLoop, SandboxConfig], _Shared] = {}


class SharedPool:
    """The pool of a configuration, one in each event loop; starting it takes longer than an episode may."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config

    async def acquire(self) -> CodeSandbox:
        """Raises what starting the pool raises."""
        key = (asyncio.get_running_loop(), self._config)
        if key not in _shared:
            pool = SandboxPool(self._config)
            _shared[key] = _Shared(pool, asyncio.ensure_future(pool.start()))
        shared = _shared[key]
        shared.num_users += 1
        try:
            # Whoever is called off while it starts does not call the start off for the others.
            await asyncio.shield(shared.starting)
        except BaseException:
            await self.release()
            raise
        return shared.pool

    async def release(self) -> None:
        key = (asyncio.get_running_loop(), self._config)
        shared = _shared[key]
        shared.num_users -= 1
        if shared.num_users:
            return
        del _shared[key]
        with contextlib.suppress(Exception):  # it was raised where the pool was asked for
            await shared.starting
        await shared.pool.close()

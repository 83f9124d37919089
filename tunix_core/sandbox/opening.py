"""A sandbox by its name."""

from __future__ import annotations

from typing import Literal

from tunix_core.sandbox.limits import SandboxConfig
from tunix_core.sandbox.monty import MontySandbox
from tunix_core.sandbox.pool import SandboxPool
from tunix_core.sandbox.results import Sandbox
from tunix_core.validation import require_choice

SandboxName = Literal["bubblewrap", "monty"]


async def open_sandbox(name: SandboxName, config: SandboxConfig | None = None) -> Sandbox:
    """A started one. What is asked for is what one gets: neither stands in for the other.

    Raises:
        ConfigError: unknown name, a package is missing, or this machine cannot isolate so.
    """
    require_choice("sandbox", name, SandboxName)
    config = config or SandboxConfig()
    if name == "monty":
        monty = MontySandbox(config)
        await monty.start()
        return monty
    pool = SandboxPool(config)
    await pool.start()
    return pool

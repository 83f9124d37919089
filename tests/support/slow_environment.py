"""An installed environment whose tool takes a random time, whatever the policy says; rewards differ within a group."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from tunix_core.environment_config import EnvironmentConfig
from tunix_core.environments import Observation, StepResult, ToolCall

NAME = "slow_tools"


class SlowTools:
    """Two messages; the first one waits for its tool. Paid is an even number of bytes."""

    name = NAME

    def __init__(self, config: EnvironmentConfig, *, latency: bool, weather_seed: int) -> None:
        self._mean = config.latency_mean_seconds if latency else 0.0
        self._sigma = config.latency_sigma
        self._weather = random.Random(weather_seed)
        self._steps = 0

    async def reset(self, seed: int) -> Observation:
        self._steps = 0
        return Observation(f"go {seed % 10}")

    async def step(self, message: str) -> StepResult:
        self._steps += 1
        if self._steps == 1:
            await asyncio.sleep(self._mean * self._weather.lognormvariate(0, self._sigma))
            return StepResult("ok", 0.0, False, (ToolCall("wait", True),))
        answer = float(len(message.encode()) % 2 == 0)
        return StepResult("", answer, True, components={"answer": answer})

    async def close(self) -> None:
        """Holds nothing."""


def install(folder: Path) -> Path:
    """Metadata as of an installed package; put the folder on PYTHONPATH."""
    metadata = folder / "slow_tools-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-tools\nVersion: 1.0\n")
    entry = f"{NAME} = {SlowTools.__module__}:SlowTools"
    (metadata / "entry_points.txt").write_text(f"[tunix_airflow.environments]\n{entry}\n")
    return folder

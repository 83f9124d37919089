"""What a figure was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "pyarrow")


def describe() -> dict[str, str]:
    """Machine and versions; the CPUs are those this process may use."""
    return {
        "cpu": _cpu_model(),
        "cpus": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "load_1_minute": f"{os.getloadavg()[0]:.2f}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def print_description() -> None:
    for name, value in describe().items():
        print(f"{name:14} {value}")


class OtherLoad:
    """Of the CPUs that this process may use, how many others used since its construction."""

    def __init__(self) -> None:
        self._busy = _busy_cpu_seconds()
        self._started = time.monotonic()

    def cpus(self, own_cpu_seconds: float) -> float:
        """Mean since construction, without `own_cpu_seconds`."""
        spent = _busy_cpu_seconds() - self._busy - own_cpu_seconds
        return max(0.0, spent / (time.monotonic() - self._started))


def _busy_cpu_seconds() -> float:
    """Of those CPUs since boot: user, nice, system, interrupts and what the host took."""
    own = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in own:
            user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")

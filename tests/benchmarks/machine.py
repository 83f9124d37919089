"""What a figure was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
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

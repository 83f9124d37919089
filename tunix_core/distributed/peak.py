"""The rate of matrix products that the devices reach: the denominator of utilisation, measured instead of looked up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

MEASURE_SECONDS = 0.3
CPU_WIDTH, ACCELERATOR_WIDTH = 1024, 8192
"""Large enough that a product is bound by arithmetic; 8192 are 256 MiB a matrix."""


def measure_peak_flops(
    devices: Sequence[jax.Device] | None = None,
    *,
    width: int | None = None,
    seconds: float = MEASURE_SECONDS,
    monotonic: Callable[[], float] = time.perf_counter,
) -> float:
    """FLOP/s of float32 products `[n, n] x [n, n]` at JAX's default precision, on all devices of the learner together.

    The best of repetitions, since whatever else runs on the machine only slows them. Compiles: call it during
    warm-up.

    Args:
        devices: by default all of this process, all at once; other processes are taken to have the same.
        width: n; by default what suits the platform.
        seconds: how long to repeat.
    """
    num_processes = jax.process_count() if devices is None else 1
    devices = jax.local_devices() if devices is None else devices
    n = width or (CPU_WIDTH if devices[0].platform == "cpu" else ACCELERATOR_WIDTH)
    matrix = np.full((n, n), 1 / n, np.float32)
    operands = [jax.device_put(matrix, device) for device in devices]
    product = jax.jit(lambda a: a @ a)
    jax.block_until_ready([product(a) for a in operands])
    best, began = float("inf"), monotonic()
    while monotonic() - began < seconds or best == float("inf"):
        started = monotonic()
        jax.block_until_ready([product(a) for a in operands])
        best = min(best, monotonic() - started)
    return num_processes * len(devices) * 2.0 * n**3 / best

"""What a sandboxed call costs, against a plain process, bubblewrap and Python per call, and Monty.

    python -m tests.benchmarks.sandbox [--quick] [--json FILE] [--check]

Every way runs the same small program and hands back what it prints; they take turns, one call each, so that
what else the machine does falls on all alike. Then many callers share a pool, for calls per second.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tests.benchmarks.figures import Goal
from tests.benchmarks.parts import Part, run_parts
from tunix_core.sandbox.launch import find_bubblewrap, host_python
from tunix_core.sandbox.limits import SandboxConfig, SandboxLimits
from tunix_core.sandbox.monty import MontySandbox
from tunix_core.sandbox.pool import SandboxPool

SOURCE = "print(sum(i * i for i in range(100)))"
PRINTED = "328350\n"
TEST = {"sums": "assert squares(100) == 328350"}
SUBMISSION = "def squares(n): return sum(i * i for i in range(n))"
NUM_CALLERS = 100
MAX_RATIO = 0.5
"""Of the pool's median to that of a sandbox made for each call."""

Way = Callable[[], Awaitable[str]]


class Quantiles(NamedTuple):
    """Of the seconds of one call, in milliseconds."""

    p50: float
    p99: float
    low: float
    num: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Quantiles:
        ordered = sorted(1000 * value for value in seconds)
        return cls(ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1))], ordered[0], len(ordered))


async def _process(command: Sequence[str]) -> str:
    def run() -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL).stdout

    return await asyncio.to_thread(run)


def ways(pool: SandboxPool, monty: MontySandbox) -> dict[str, Way]:
    """Each answers with what the program printed."""
    python = [host_python(), "-I", "-S", "-c", SOURCE]
    bubblewrap = [
        find_bubblewrap().path,
        "--unshare-all",
        "--die-with-parent",
        "--ro-bind",
        "/",
        "/",
        "--tmpfs",
        "/tmp",
    ]

    async def pooled() -> str:
        return (await pool.run(SOURCE)).stdout

    async def session() -> str:
        return (await pool.session(files={"data.txt": b"x" * 10_000}).run(SOURCE)).stdout

    async def check() -> str:
        return PRINTED if (await pool.check(SUBMISSION, tests=TEST)).passed else ""

    async def interpreted() -> str:
        return (await monty.run(SOURCE)).stdout

    return {
        "pool": pooled,
        "pool, session with a file of 10 kB": session,
        "pool, a submission and its test": check,
        "python, no sandbox": lambda: _process(python),
        "bubblewrap and python per call": lambda: _process([*bubblewrap, "--", *python]),
        "monty": interpreted,
    }


async def _measure(num_rounds: int, num_calls: int) -> dict[str, Any]:
    """Milliseconds by way, and calls per second of many callers."""
    config = SandboxConfig(num_slots=4, limits=SandboxLimits(wall_seconds=60.0, cpu_seconds=60))
    monty = MontySandbox(config)
    await monty.start()
    started = time.perf_counter()
    async with SandboxPool(config) as pool:
        start_seconds = time.perf_counter() - started
        compared = ways(pool, monty)
        taken: dict[str, list[float]] = {name: [] for name in compared}
        for number in range(num_rounds + 2):
            for name, way in compared.items():
                begun = time.perf_counter()
                printed = await way()
                if printed != PRINTED:
                    raise RuntimeError(f"{name} printed {printed!r}")
                if number >= 2:  # the first calls warm up
                    taken[name].append(time.perf_counter() - begun)
        rate = await _rate(pool, num_calls)
        description = pool.description
    await monty.close()
    return {
        "milliseconds": {name: Quantiles.of(values)._asdict() for name, values in taken.items()},
        "calls_per_second": rate,
        "start_seconds": start_seconds,
        "isolation": description,
    }


async def _rate(pool: SandboxPool, num_calls: int) -> float:
    async def caller() -> None:
        for _ in range(num_calls // NUM_CALLERS):
            await pool.run(SOURCE)

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(NUM_CALLERS)))
    return num_calls / (time.perf_counter() - started)


def goals(figures: dict[str, Any]) -> list[Goal]:
    times = figures["milliseconds"]
    ratio = times["pool"]["p50"] / times["bubblewrap and python per call"]["p50"]
    return [Goal("median call, pool over bubblewrap and python per call", ratio, MAX_RATIO, at_least=False)]


def measure(*, quick: bool) -> tuple[dict[str, Any], list[Goal]]:
    figures = asyncio.run(_measure(100, 300) if quick else _measure(1000, 3000))
    return figures, goals(figures)


def report(figures: dict[str, Any]) -> None:
    print(f"\n{figures['isolation']}; started in {figures['start_seconds']:.2f} s\n")
    pool = figures["milliseconds"]["pool"]["p50"]
    print(f"{'one call, ms':38} {'p50':>8} {'p99':>8} {'lowest':>8} {'of pool':>8}")
    for name, times in figures["milliseconds"].items():
        print(f"{name:38} {times['p50']:8.2f} {times['p99']:8.2f} {times['low']:8.2f} {times['p50'] / pool:8.2f}")
    print(f"\n{NUM_CALLERS} callers over 4 sandboxes: {figures['calls_per_second']:.0f} calls/s")


PARTS = {"calls": Part(measure, report)}


def main(argv: list[str] | None = None, parts: Mapping[str, Part] = PARTS) -> int:
    return run_parts("sandbox", parts, argv)


if __name__ == "__main__":
    sys.exit(main())

"""`gs://` for tests: a real fake-gcs-server process on loopback, as it is or through a proxy that injects faults."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

from tests.support.fault_proxy import FaultProxy, FaultRates, SeededFaults
from tunix_core.console.emulator import Emulator, emulator_environment, start_fake_gcs

__all__ = ["Emulator", "FaultyGcs", "emulated_gcs", "environment", "faulty_gcs", "start_fake_gcs"]


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def emulated_gcs(bucket: str = "tunix") -> Iterator[Emulator]:
    """An emulator for the block, with this process's environment pointing at it."""
    emulator = start_fake_gcs(bucket)
    try:
        with environment(emulator.env):
            yield emulator
    finally:
        emulator.stop()


@dataclasses.dataclass
class FaultyGcs:
    """The emulator behind a proxy that injects faults."""

    emulator: Emulator
    proxy: FaultProxy
    faults: SeededFaults
    """Its `rates` may be replaced while requests run."""

    @property
    def uri(self) -> str:
        """`gs://bucket`."""
        return self.emulator.uri

    @property
    def env(self) -> dict[str, str]:
        """What a process must have in its environment to come through the proxy."""
        return emulator_environment(self.proxy.url)


@contextlib.contextmanager
def faulty_gcs(emulator: Emulator, rates: FaultRates, *, seed: int, **seconds: float) -> Iterator[FaultyGcs]:
    """`emulator` through a fault-injecting proxy for the block, with this process's environment pointing at it.

    Args:
        seconds: `slow_seconds` and `delay_seconds` of the proxy.
    """
    faults = SeededFaults(rates, seed=seed)
    proxy = FaultProxy(emulator.url, faults, **seconds)
    try:
        faulty = FaultyGcs(emulator=emulator, proxy=proxy, faults=faults)
        with environment(faulty.env):
            yield faulty
    finally:
        proxy.stop()

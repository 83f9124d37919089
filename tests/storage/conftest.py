"""Stores for tests: every backend, the real protocol each."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fault_proxy import FaultRates
from tests.support.gcs import Emulator, environment, faulty_gcs
from tunix_core.storage.store import ObjectStore, open_store

_COUNTER = itertools.count()

FAULTS = FaultRates.each(0.02)
"""One request in seven meets one."""


@pytest.fixture(params=["local", "memory", "gs", "gs-faults"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A fresh, empty store of each kind; those with faults are reached through the fault-injecting proxy."""
    if request.param == "local":
        yield str(tmp_path / "store")
    elif request.param == "memory":
        yield f"memory://test-{next(_COUNTER)}"
    elif request.param == "gs":
        emulator: Emulator = request.getfixturevalue("gcs")
        with environment(emulator.env):
            yield f"{emulator.uri}/test-{next(_COUNTER)}/run"
    else:
        emulator = request.getfixturevalue("gcs")
        seed = zlib.crc32(request.node.name.encode())
        with faulty_gcs(emulator, FAULTS, seed=seed, slow_seconds=0.02, delay_seconds=0.02) as faulty:
            yield f"{faulty.uri}/test-{next(_COUNTER)}/run"


@pytest.fixture
def store(uri: str) -> ObjectStore:
    return open_store(uri)


@pytest.fixture
def memory() -> ObjectStore:
    return open_store(f"memory://test-{next(_COUNTER)}")


@pytest.fixture
def local(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "store"))

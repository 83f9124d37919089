"""Stores for tests: every backend, the real protocol each."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.support.gcs import Emulator
from tunix_core.storage.store import ObjectStore, open_store

_COUNTER = itertools.count()


@pytest.fixture(params=["local", "memory", "gs"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh, empty store of each kind."""
    if request.param == "local":
        return str(tmp_path / "store")
    if request.param == "memory":
        return f"memory://test-{next(_COUNTER)}"
    emulator: Emulator = request.getfixturevalue("gcs")
    return f"{emulator.uri}/test-{next(_COUNTER)}/run"


@pytest.fixture
def store(uri: str) -> ObjectStore:
    return open_store(uri)


@pytest.fixture
def memory() -> ObjectStore:
    return open_store(f"memory://test-{next(_COUNTER)}")


@pytest.fixture
def local(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "store"))

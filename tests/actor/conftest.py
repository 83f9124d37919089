"""One policy server for the session: its start costs seconds, what it loads and which faults it has does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server_process import ServerProcess, export

FIRST_SEED = 9
"""Of the weights that the server starts with: those of no version."""


@pytest.fixture(scope="session")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(export(tmp_path_factory.mktemp("served") / "first", FIRST_SEED))
    yield server
    server.close()


@pytest.fixture
def policy_server(_server: ServerProcess) -> ServerProcess:
    """Serving, without faults."""
    _server.wait()
    return _server


@pytest.fixture(scope="session")
def served_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where folders of weights lie, each written once."""
    return tmp_path_factory.mktemp("weights")

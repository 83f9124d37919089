"""Fixtures that more than one folder of tests needs, an Airflow home of the session's own, and a quick compiler."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import pytest

from tests.support import scheduling
from tests.support.airflow_service import ScriptedAirflow
from tests.support.quick_compiler import QUICK_FLAGS
from tunix_core.distributed.compilation import CACHE_VARIABLE

if TYPE_CHECKING:
    from tests.support.gcs import Emulator
    from tests.support.server_process import ServerProcess


def _compile_quickly() -> None:
    """Only in this process: XLA reads its flags once. What tests start compiles as users' processes do."""
    before = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{before} {QUICK_FLAGS}".strip()
    jax.devices()
    del os.environ["XLA_FLAGS"]
    if before:
        os.environ["XLA_FLAGS"] = before


def _keep_executables(config: pytest.Config, temporary: Path) -> None:
    """From one run of the tests to the next, and between the processes that one starts.

    Apart from each other, since those are optimised; and by worker, since JAX does not write an entry in one piece.
    """
    kept = config.cache.mkdir("xla") if config.pluginmanager.hasplugin("cacheprovider") else temporary / "xla"
    folder = kept / getattr(config, "workerinput", {}).get("workerid", "alone")
    os.environ[CACHE_VARIABLE] = str(folder / "started")
    jax.config.update("jax_compilation_cache_dir", str(folder / "here"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def pytest_configure(config: pytest.Config) -> None:
    """Airflow reads its environment when it is imported, so this comes before any test module."""
    config.pluginmanager.register(scheduling)
    _compile_quickly()
    folder = tempfile.TemporaryDirectory(prefix="airflow-home-")
    config.add_cleanup(folder.cleanup)
    home = Path(folder.name)
    _keep_executables(config, home)
    for name in [name for name in os.environ if name.startswith("AIRFLOW")]:
        del os.environ[name]
    os.environ |= {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(home / "no-plugins"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(Path(__file__).parents[1] / "dags"),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "WARNING",
    }


@pytest.fixture(scope="session")
def cache() -> Path:
    """Compiled executables that processes share, also those of the next run of the tests."""
    return Path(os.environ[CACHE_VARIABLE])


@pytest.fixture
def scripted_service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ScriptedAirflow:
    """One real Airflow for all tests that are marked `airflow`, from the first that asks for it to the last."""
    return scheduling.airflow_of(request.session, tmp_path_factory)


@pytest.fixture(scope="session")
def gcs() -> Iterator[Emulator]:
    """fake-gcs-server, one process for the session; `tests.support.gcs.faulty_gcs` puts the fault proxy before it."""
    from tests.support.gcs import emulated_gcs

    with emulated_gcs() as emulator:
        yield emulator


@pytest.fixture(scope="session")
def _policy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    from tests.support.server_process import FIRST_SEED, ServerProcess, export

    server = ServerProcess(export(tmp_path_factory.mktemp("served") / "first", FIRST_SEED))
    yield server
    server.close()


@pytest.fixture
def policy_server(_policy_server: ServerProcess) -> ServerProcess:
    """vLLM's and SGLang's API over our decoder, one process for the session; serving, without faults."""
    return _policy_server.wait()


@pytest.fixture(scope="session")
def served_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where folders of weights lie, each written once."""
    return tmp_path_factory.mktemp("weights")

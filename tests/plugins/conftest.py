"""Airflow without a service: a home and a store of the test's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tunix_core.config_loading import load_recipe
from tunix_core.storage.run_directory import create_run
from tunix_core.storage.store import ObjectStore, open_store

SCRIPTED = Path(__file__).parents[1] / "support/scripted"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The only configured root."""
    uri = f"file://{tmp_path}/runs"
    monkeypatch.setenv("TUNIX_STORE_ROOTS", uri)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # the project's own folder would come before PYTHONPATH
    monkeypatch.setenv("PYTHONPATH", f"{SCRIPTED}:{SCRIPTED.parents[2]}")
    monkeypatch.setenv("TUNIX_TEST_SCRIPTS", str(tmp_path / "scripts.json"))
    (tmp_path / "scripts.json").write_text('{"0": {}}')
    return uri


@pytest.fixture
def store(root: str) -> ObjectStore:
    """A run directory, with its run.json."""
    store = open_store(f"{root}/some-run")
    create_run(
        store, load_recipe("lookup", {"actor.num_groups": 2}), run_id="manual__1", extra={"dag_id": "post_training"}
    )
    return store


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., None]:
    """script(process={…}): what the components of the run (seed 0) play."""

    def write(**scripts: dict[str, object]) -> None:
        (tmp_path / "scripts.json").write_text(json.dumps({"0": scripts}))

    return write

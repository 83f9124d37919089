from __future__ import annotations

import pytest

from tunix_core import paths
from tunix_core.config import RunConfig
from tunix_core.errors import ConfigError, CorruptObject, ObjectMissing
from tunix_core.storage.run_directory import create_run, list_runs, read_run
from tunix_core.storage.store import ObjectStore, join_uri, open_store, read_json, write_json


def test_a_run_is_written_once_and_read_back(store: ObjectStore) -> None:
    with pytest.raises(ObjectMissing):
        read_run(store)
    config = RunConfig(recipe="lookup", seed=3)
    create_run(store, config, run_id="run-1", extra={"dag_run": "manual__1"})
    before = store.get(paths.RUN)
    create_run(store, config, run_id="run-1", extra={"dag_run": "manual__1"})
    assert store.get(paths.RUN) == before
    found, details = read_run(store)
    assert found == config
    assert (details["run_id"], details["dag_run"]) == ("run-1", "manual__1")
    assert details["created_at"] > 0


@pytest.mark.parametrize(
    ("change", "named"), [({"run_id": "run-2"}, "run_id"), ({"extra": {"a": 1}}, "extra"), ({"config": 9}, "config")]
)
def test_another_run_is_refused(memory: ObjectStore, change: dict, named: str) -> None:
    create_run(memory, RunConfig(recipe="lookup"), run_id="run-1")
    config = RunConfig(recipe="lookup", seed=change.pop("config", 0))
    with pytest.raises(ConfigError, match=f"its {named} differ"):
        create_run(memory, config, **{"run_id": "run-1", **change})


def test_broken_run_files(memory: ObjectStore) -> None:
    create_run(memory, RunConfig(recipe="lookup"), run_id="run-1")
    value = read_json(memory, paths.RUN)
    for broken in ({**value, "format": 2}, {k: v for k, v in value.items() if k != "config"}):
        write_json(memory, paths.RUN, broken)
        with pytest.raises(CorruptObject):
            read_run(memory)
    write_json(memory, paths.RUN, {**value, "config": {"recipe": "lookup", "unknown": 1}})
    with pytest.raises(ConfigError, match="unknown"):
        read_run(memory)


def test_runs_under_a_root(uri: str) -> None:
    root = open_store(uri)
    assert list_runs(uri) == []
    for name in ("b", "a"):
        create_run(open_store(join_uri(root.uri, name)), RunConfig(recipe="lookup"), run_id=name)
    root.put("other/file", b"")
    root.put("file", b"")
    assert list_runs(uri) == ["a", "b"]

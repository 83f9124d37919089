"""`run.json`: a run's resolved configuration, written once and the only one its processes read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunix_core import paths
from tunix_core.config import RunConfig
from tunix_core.config_loading import config_from_dict, config_to_dict
from tunix_core.errors import ConfigError, CorruptObject, ObjectExists
from tunix_core.storage.store import ObjectStore, from_json, join_uri, normalize_uri, open_store, read_json, to_json

_FORMAT = 1


def create_run(store: ObjectStore, config: RunConfig, *, run_id: str, extra: Mapping[str, Any] | None = None) -> None:
    """Write `run.json`; the same run again is fine.

    Args:
        run_id: names the run to people and to Airflow.
        extra: what else belongs to the run (JSON): the reference's digest, the DAG run, versions.

    Raises:
        ConfigError: the directory holds a run with another id, configuration or extra.
    """
    content = {"format": _FORMAT, "run_id": run_id, "config": config_to_dict(config), "extra": dict(extra or {})}
    content = from_json(paths.RUN, to_json(content))
    try:
        store.put_if_absent(paths.RUN, to_json({**content, "created_at": time.time()}))
    except ObjectExists:
        found = read_json(store, paths.RUN)
        found.pop("created_at", None)
        if found != content:
            differing = sorted(name for name in content if found.get(name) != content[name])
            raise ConfigError(
                "run directory",
                store.uri,
                f"an empty one, or the same run again; its {', '.join(differing)} differ",
                "Choose another run URI.",
            ) from None


def read_run(store: ObjectStore) -> tuple[RunConfig, dict[str, Any]]:
    """The configuration, and `extra` with `run_id` and `created_at` beside it.

    Raises:
        ObjectMissing: no run there.
        CorruptObject: not a `run.json` of this release.
        ConfigError: a configuration that this release refuses.
    """
    value = read_json(store, paths.RUN)
    if value.get("format") != _FORMAT:
        raise CorruptObject(f"{paths.RUN}: received format {value.get('format')!r}, accepted {_FORMAT}")
    try:
        details = {**value["extra"], "run_id": value["run_id"], "created_at": value["created_at"]}
        config = value["config"]
    except (KeyError, TypeError) as error:
        raise CorruptObject(f"{paths.RUN}: missing {error}") from error
    return config_from_dict(config), details


def name_from_uri(uri: str) -> str:
    """The last part of a run's URI, for a run that nobody named."""
    _, _, path = uri.partition("://")
    last = path.rstrip("/").rsplit("/", 1)[-1]
    if not last:
        raise ConfigError("run URI", uri, "one with a last part", "Name the run with --name.")
    return last.lower()


def list_runs(root: str) -> list[str]:
    """Names of the runs directly under a root, in order. Costs one listing of folders, not of keys."""
    uri = normalize_uri(root)
    scheme, _, rest = uri.partition("://")
    if scheme == "file":
        folder = Path(rest)
        names = [entry.name for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
    elif scheme == "gs":
        from tunix_core.storage.gcs_store import GcsStore  # imports gcsfs, 1 to 2 s

        bucket, _, prefix = rest.partition("/")
        names = GcsStore(bucket, prefix).list_folders()
    else:
        names = [key.split("/")[0] for key in open_store(uri).list_after("") if "/" in key]
    runs = (name for name in set(names) if not name.startswith("."))
    return sorted(name for name in runs if open_store(join_uri(uri, name)).exists(paths.RUN))

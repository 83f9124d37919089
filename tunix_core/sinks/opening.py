"""From names in the configuration to sinks: packages are looked for at once, services are talked to later."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunix_core.config import RunConfig
from tunix_core.config_loading import config_to_dict
from tunix_core.errors import ConfigError
from tunix_core.sinks.base import MetricSink, SinkThread
from tunix_core.sinks.mlflow_run import MlflowSink
from tunix_core.sinks.tensorboard import TensorBoardSink
from tunix_core.sinks.wandb_run import WandbSink
from tunix_core.storage.store import ObjectStore

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
"""Sink -> the module it needs. The package's extra has the sink's name."""


def open_sinks(
    store: ObjectStore, config: RunConfig, *, process: str, incarnation: str, log: Callable[[str], None]
) -> SinkThread:
    """The sinks of `observability.sinks`, fed by their own thread.

    Raises:
        ConfigError: the package of a named sink is not installed.
    """
    for sink in config.observability.sinks:
        if importlib.util.find_spec(PACKAGES[sink]) is None:
            raise ConfigError(
                "observability.sinks",
                sink,
                f"a sink whose package {PACKAGES[sink]!r} is installed",
                f"pip install 'tunix-airflow[{sink}]' where the learner runs, or remove the sink.",
            )
        _require_a_place(sink, config.observability.local_folder)
    temporary: tempfile.TemporaryDirectory[str] | None = None
    if config.observability.sinks and not config.observability.local_folder:
        temporary = tempfile.TemporaryDirectory(prefix="tunix-sinks-", ignore_cleanup_errors=True)
    root = Path(temporary.name if temporary else config.observability.local_folder) / f"{process}-{incarnation}"
    openers: dict[str, Callable[[], MetricSink]] = {
        sink: functools.partial(_open, sink, store, config, root / sink, process, incarnation)
        for sink in config.observability.sinks
    }
    return SinkThread(openers, log=log, cleanup=temporary.cleanup if temporary else None)


def _require_a_place(sink: str, local_folder: str) -> None:
    """Refuse what could only end in a temporary folder, and so would be lost."""
    if sink == "wandb" and os.environ.get("WANDB_MODE") in ("offline", "dryrun") and not local_folder:
        raise ConfigError(
            "observability.local_folder",
            local_folder,
            f"an absolute path, with the sink wandb and WANDB_MODE={os.environ['WANDB_MODE']}",
            "The temporary folder would be removed with all that the sink wrote.",
        )
    if sink == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise ConfigError(
            "observability.sinks",
            sink,
            "mlflow where the learner's environment has MLFLOW_TRACKING_URI",
            "Name the tracking server in it; MLflow keeps runs in plain files no more.",
        )


def _open(sink: str, store: ObjectStore, config: RunConfig, folder: Path, process: str, incarnation: str) -> MetricSink:
    module = importlib.import_module(PACKAGES[sink])
    if sink == "tensorboard":
        return TensorBoardSink(module.SummaryWriter, store, folder, process=process, incarnation=incarnation)
    run_name = store.uri.rstrip("/").rsplit("/", 1)[-1]
    run_id = hashlib.sha256(f"{store.uri} {process}".encode()).hexdigest()[:16]
    if sink == "wandb":
        return WandbSink(module, folder, run_name=run_name, run_id=run_id, config=_flat(config))
    return MlflowSink(module, run_name=run_name, run_id=run_id, config=_flat(config))


def _flat(config: RunConfig) -> dict[str, Any]:
    """`section.field` -> value."""
    flat: dict[str, Any] = {}
    for name, value in config_to_dict(config).items():
        flat |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return flat

"""Weights & Biases. `WANDB_MODE`, `WANDB_PROJECT` and the rest of its environment are honoured."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROJECT = "tunix-airflow"


class WandbSink:
    """One run of the service per run directory and process: a restarted process continues it."""

    def __init__(self, wandb: Any, folder: Path, *, run_name: str, run_id: str, config: Mapping[str, Any]) -> None:
        """
        Args:
            wandb: the module.
            folder: local, for its files; those of an offline run wait there for `wandb sync`.
            run_id: the same in each life of the process.
        """
        folder.mkdir(parents=True, exist_ok=True)
        project = os.environ.get("WANDB_PROJECT") or PROJECT
        self._run = wandb.init(
            project=project, name=run_name, id=run_id, resume="allow", dir=str(folder), config=dict(config)
        )

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()

"""MLflow. `MLFLOW_TRACKING_URI` and the rest of its environment say where the server is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

EXPERIMENT = "tunix-airflow"
_MAX_METRICS, _MAX_PARAMS = 1000, 100
"""The protocol's limits of one request."""


class MlflowSink:
    """One MLflow run per life of the process, through its client, which has no global state."""

    def __init__(self, mlflow: Any, *, run_name: str, run_id: str, config: Mapping[str, Any]) -> None:
        """
        Args:
            mlflow: the module.
            run_id: the same in each life of the process; the tag `tunix_run`, to group them by.
        """
        self._metric = mlflow.entities.Metric
        self._client = mlflow.MlflowClient()
        experiment = self._client.get_experiment_by_name(EXPERIMENT)
        experiment_id = self._client.create_experiment(EXPERIMENT) if experiment is None else experiment.experiment_id
        self._run_id = self._client.create_run(experiment_id, run_name=run_name, tags={"tunix_run": run_id}).info.run_id
        params = [mlflow.entities.Param(name, str(value)) for name, value in sorted(config.items())]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _MAX_PARAMS])

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in scalars.items()]
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MAX_METRICS])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

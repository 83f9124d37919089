"""Sinks with a script, and modules that record how they are called."""

from __future__ import annotations

import struct
import threading
import types
from collections.abc import Mapping
from typing import Any

from tensorboardX.proto.event_pb2 import Event


class ListSink:
    """Keeps what it gets; raises at `fails_at`, and waits for `gate` at every row where there is one."""

    def __init__(self, *, fails_at: int | None = None, gate: threading.Event | None = None) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        self._fails_at = fails_at
        self._gate = gate

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._gate is not None:
            self._gate.wait()
        if step == self._fails_at:
            raise RuntimeError("the service is gone")
        self.rows.append((step, dict(scalars)))

    def close(self) -> None:
        self.closed += 1


def events(data: bytes) -> dict[str, list[tuple[int, float]]]:
    """Tag -> its (step, value)s, of an event file: records of length, checksum, body, checksum."""
    found: dict[str, list[tuple[int, float]]] = {}
    offset = 0
    while offset < len(data):
        (size,) = struct.unpack_from("<Q", data, offset)
        body = data[offset + 12 : offset + 12 + size]
        assert len(body) == size, "it ends with a whole record"
        event = Event.FromString(body)
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
        offset += size + 16
    return found


class FakeWandb:
    """The part of `wandb` that the sink calls, recorded."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **kwargs: Any) -> FakeWandb:
        self.inits.append(kwargs)
        return self

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        self.logged.append((step, scalars))

    def finish(self) -> None:
        self.finished += 1


class FakeMlflow:
    """The part of `mlflow` that the sink calls, recorded; it is its own client."""

    def __init__(self) -> None:
        self.entities = types.SimpleNamespace(
            Metric=lambda key, value, timestamp, step: (key, value, step) if timestamp > 0 else None,
            Param=lambda key, value: (key, value),
        )
        self.experiments: dict[str, str] = {}
        self.runs: list[dict[str, Any]] = []
        self.batches: list[tuple[str, dict[str, Any]]] = []
        self.terminated: list[str] = []

    def MlflowClient(self) -> FakeMlflow:
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return types.SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = f"e{len(self.experiments)}"
        return self.experiments[name]

    def create_run(self, experiment_id: str, **kwargs: Any) -> Any:
        self.runs.append({"experiment_id": experiment_id, **kwargs})
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"r{len(self.runs)}"))

    def log_batch(self, run_id: str, **kwargs: Any) -> None:
        self.batches.append((run_id, kwargs))

    def set_terminated(self, run_id: str) -> None:
        self.terminated.append(run_id)

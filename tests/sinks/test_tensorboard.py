"""With the real tensorboardX: what was written is read back from the event files in the run directory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter

from tests.learner.support import make_config, make_learner, open_run, write_shards
from tests.sinks.support import events
from tunix_core import paths
from tunix_core.errors import StoreError
from tunix_core.sinks.tensorboard import TensorBoardSink
from tunix_core.storage.control import read_heartbeats
from tunix_core.storage.metrics_files import read_metrics
from tunix_core.storage.store import ObjectStore, open_store

FOLDER = f"{paths.LOGS}tensorboard/learner/"


def make_sink(store: ObjectStore, folder: Path, **kwargs: Any) -> TensorBoardSink:
    return TensorBoardSink(SummaryWriter, store, folder, process="learner", incarnation="l0", **kwargs)


def uploaded(store: ObjectStore) -> dict[str, list[tuple[int, float]]]:
    """Of all event files, in the order in which TensorBoard reads them."""
    found: dict[str, list[tuple[int, float]]] = {}
    for key in store.list_after(FOLDER):
        for tag, points in events(store.get(key)).items():
            found.setdefault(tag, []).extend(points)
    return found


def test_a_learners_run_is_in_its_event_file(tmp_path: Path) -> None:
    store = open_run(tmp_path)
    write_shards(store, 14)
    local = tmp_path / "local"
    make_learner(
        store,
        make_config(**{"observability.sinks": ["tensorboard"], "observability.local_folder": str(local)}),
    ).run()
    (key,) = store.list_after(FOLDER)
    assert key.startswith(f"{FOLDER}events.out.tfevents.")
    found, rows = uploaded(store), read_metrics(store, "learner")
    for name in ("loss", "model_flops_utilization", "device_seconds", "ledger_consumed"):
        assert [step for step, _ in found[name]] == [1, 2, 3, 4, 5, 6]
        np.testing.assert_allclose([value for _, value in found[name]], rows[name][:6], rtol=1e-6)
    assert list(local.rglob("events.out.tfevents.*"))
    progress = read_heartbeats(store)["learner"].progress
    assert (progress["num_dropped_sinks"], progress["num_dropped_sink_rows"]) == (0, 0)


def test_files_are_uploaded_while_it_goes_on_and_begin_anew_when_large(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    sink = make_sink(store, tmp_path / "local", upload_seconds=0.02, part_bytes=400)
    wanted = [(step, float(step)) for step in range(1, 31)]
    for step, value in wanted:
        sink.write(step, {"loss": value})
        deadline = time.monotonic() + 120
        while uploaded(store).get("loss", [])[-1:] != [(step, value)]:
            sink._uploader.check()
            assert time.monotonic() < deadline, "it was not uploaded before the sink was closed"
            time.sleep(0.005)
    sink.close()
    assert uploaded(store)["loss"] == wanted
    assert len(store.list_after(FOLDER)) > 2


class FailingStore:
    """Its first writes fail."""

    def __init__(self, store: ObjectStore, num_failures: int) -> None:
        self._store = store
        self.num_failures = num_failures

    def put(self, key: str, data: bytes) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise StoreError("503")
        self._store.put(key, data)


def test_a_failing_store_is_tried_again(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    failing: Any = FailingStore(store, 3)
    sink = make_sink(failing, tmp_path / "local", upload_seconds=0.01)
    sink.write(1, {"loss": 0.25})
    deadline = time.monotonic() + 120
    while failing.num_failures and time.monotonic() < deadline:
        time.sleep(0.01)
    sink.close()
    assert uploaded(store) == {"loss": [(1, 0.25)]}


def test_lives_of_a_process_sort_by_their_beginning() -> None:
    keys = [
        paths.tensorboard("learner", 1_790_000_000, "l1", 0),
        paths.tensorboard("learner", 1_790_000_000, "l1", 1),
        paths.tensorboard("learner", 1_790_000_001, "l0", 0),
    ]
    assert sorted(keys) == keys

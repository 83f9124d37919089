import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.learner.support import (
    NumpyTrainer,
    consumed_ids,
    initial_weights,
    make_config,
    make_learner,
    open_run,
    write_shards,
)
from tunix_core.data.rows import RowFetcher
from tunix_core.errors import ConfigError, Diverged, Fenced, Interrupted
from tunix_core.learner.batches import batch_of_record
from tunix_core.models.flops import update_flops
from tunix_core.storage.checkpoints import CheckpointStore
from tunix_core.storage.control import read_heartbeats, read_learner_signal, read_stop, request_stop
from tunix_core.storage.metrics_files import read_metrics
from tunix_core.storage.snapshots import SnapshotStore
from tunix_core.storage.step_records import read_steps, write_step
from tunix_core.storage.trajectory_writer import TrajectoryWriter


def test_a_run_from_first_step_to_last(tmp_path: Path) -> None:
    store, config = open_run(tmp_path), make_config()
    write_shards(store, 14)
    learner = make_learner(store, config)
    learner.run()
    assert learner.clock == 6
    records = read_steps(store, 0)
    assert [r["clock"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert len(set(consumed_ids(records))) == 6 * 4
    assert SnapshotStore(store).versions()[-1] == 6
    np.testing.assert_array_equal(SnapshotStore(store).load(6)["weights"], learner.state["weights"])
    assert CheckpointStore(store).clocks()[-1] == 6
    stop = read_stop(store)
    assert stop is not None
    assert (stop.reason, stop.source, stop.failed) == ("completed", "learner", False)
    progress = read_heartbeats(store)["learner"].progress
    ledger = progress["ledger"]
    assert ledger["read"] == sum(tokens for name, tokens in ledger.items() if name != "read")
    assert ledger["buffered"] == 0
    assert ledger["consumed"] == sum(sum(g["lengths"]) for r in records for g in r["groups"])
    assert progress["ledger_trajectories"]["surplus"] + 24 == progress["ledger_trajectories"]["read"]
    signal = read_learner_signal(store)
    assert signal is not None
    assert (signal.clock, signal.state) == (6, "finished")
    rows = read_metrics(store, "learner")
    steps = rows["clock"][np.isnan(rows["final"])]
    assert steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert np.nanmax(rows["staleness_max"]) == 5
    parts = ("wait_for_data", "throttled", "pack", "transfer", "device", "other")
    total = sum(rows[f"{part}_seconds"][:6] for part in parts)
    np.testing.assert_allclose(total, rows["step_wall_seconds"][:6])
    np.testing.assert_allclose(rows["step_wall_seconds"][1:6], np.diff(rows["time"][:6]), atol=0.05)
    flops = [update_flops(config.model, np.concatenate([g["lengths"] for g in record["groups"]])) for record in records]
    assert rows["model_flops"][:6].tolist() == flops
    rate = sum(flops) / progress["totals"]["warm_seconds"]
    assert progress["model_flops_utilization"] == pytest.approx(rate / 1e12)
    assert progress["peak_flops_per_second"] == 1e12
    assert progress["totals"]["num_violations"] == 0
    assert rows["staleness_mean"][:6].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_batch_takes_the_smallest_windows_that_hold_it(tmp_path: Path) -> None:
    """Trajectories of the first groups have up to 14 tokens, of the others up to 22: a batch with those takes the larger."""
    long = {"actor.context_tokens": 32, "learner.shorter_windows": [16], "learner.num_steps": 3}
    store, config = open_run(tmp_path), make_config(**long)
    write_shards(store, 3)
    write_shards(store, 3, first=3, incarnation="a1", longer=8)
    trainer = NumpyTrainer()
    make_learner(store, config, trainer=trainer).run()
    assert trainer.compiled == {16: 4, 32: 4}
    records = read_steps(store, 0)
    longest = [max(max(g["lengths"]) for g in record["groups"]) for record in records]
    assert [record["window_tokens"] for record in records] == [16 if tokens <= 16 else 32 for tokens in longest]
    assert {record["window_tokens"] for record in records} == {16, 32}
    assert [batch.tokens.shape[1] for batch in trainer.batches] == [record["window_tokens"] for record in records]
    again = [batch_of_record(record, RowFetcher(store), config).arrays for record in records]
    for batch, replayed in zip(trainer.batches, again, strict=True):
        np.testing.assert_array_equal(batch.tokens, replayed.tokens)


def test_a_record_is_executed_again_on_other_meshes(tmp_path: Path) -> None:
    """The same windows, padded to micro-batches of that mesh; with several updates only where they stay in theirs."""
    store, config = open_run(tmp_path), make_config(**{"learner.num_steps": 2})
    write_shards(store, 6)
    trainer = NumpyTrainer()
    make_learner(store, config, trainer=trainer).run()
    (record, _), fetch = read_steps(store, 0), RowFetcher(store)
    tokens = trainer.batches[0].tokens
    for data in (2, 4, 8):
        other = make_config(**{"mesh.data": data, "learner.max_windows": 8})
        again = batch_of_record(record, fetch, other)
        assert again.num_windows % data == 0
        np.testing.assert_array_equal(again.arrays.tokens[: len(tokens)], tokens)
        assert not again.arrays.loss_mask[len(tokens) :].any()
        np.testing.assert_array_equal(again.denominator, batch_of_record(record, fetch, config).denominator)
    twice = make_config(**{"mesh.data": 2, "learner.max_windows": 8, "learner.updates_per_batch": 2})
    with pytest.raises(ConfigError, match=r"mesh: received .*, accepted data \* fsdp with 1 windows in a micro-batch"):
        batch_of_record(record, fetch, twice)


def test_over_the_bound_nothing_is_consumed(tmp_path: Path) -> None:
    """All data is of version 0 and the bound is 2: three steps, then the learner waits."""
    store, config = open_run(tmp_path), make_config(**{"staleness.max_staleness": 2})
    write_shards(store, 14)
    learner = make_learner(store, config, interrupted=lambda: learner.clock == 3 and stale() > 0)
    stale = lambda: learner.progress()["ledger_trajectories"]["stale"]  # noqa: E731
    with pytest.raises(Interrupted):
        learner.run()
    assert max(r["mean_staleness"] for r in read_steps(store, 0)) == 2
    ledger = learner.progress()["ledger_trajectories"]
    assert (ledger["consumed"], ledger["stale"], ledger["buffered"]) == (12, 16, 0)


def test_signal_is_published_while_the_learner_waits(tmp_path: Path) -> None:
    store, config = open_run(tmp_path), make_config()
    ended = threading.Event()
    learner = make_learner(store, config, interrupted=ended.is_set)

    def run() -> None:
        with pytest.raises(Interrupted):
            learner.run()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        write_shards(store, 3)  # one batch and a half
        while (signal := read_learner_signal(store)) is None or signal.clock < 1 or signal.state != "waiting":
            assert thread.is_alive()
        # (target + 1) * B groups, less the one that is queued
        assert signal.capacity_groups == (signal.target + 1) * 2 - 1
        first = signal.updated_at
        while read_learner_signal(store).updated_at == first:
            assert thread.is_alive()
    finally:
        ended.set()
        thread.join()


def test_interrupted_then_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    config = make_config()
    whole = open_run(tmp_path / "a")
    write_shards(whole, 12)
    expected = make_learner(whole, config)
    expected.run()
    parts = open_run(tmp_path / "b")
    write_shards(parts, 12)
    first = make_learner(parts, config, interrupted=lambda: first.clock >= 3)
    with pytest.raises(Interrupted):
        first.run()
    assert 3 <= first.clock < 6
    second = make_learner(parts, config, incarnation="l1")
    second.run()
    np.testing.assert_array_equal(second.state["weights"], expected.state["weights"])
    assert second.progress()["ledger"] == expected.progress()["ledger"]


def test_a_second_learner_is_fenced(tmp_path: Path) -> None:
    store = open_run(tmp_path)
    write_shards(store, 4)
    learner = make_learner(store, make_config())
    original = learner._replay

    def replay_then_lose() -> None:
        original()
        write_step(store, 1, {"incarnation": "other"})

    learner._replay = replay_then_lose  # type: ignore[method-assign]  # the other learner is faster just here
    with pytest.raises(Fenced, match="other"):
        learner.run()


def test_repeated_nonfinite_updates_end_the_run(tmp_path: Path) -> None:
    store = open_run(tmp_path)
    write_shards(store, 12)
    learner = make_learner(store, make_config(), trainer=NumpyTrainer(nonfinite_from=2))
    with pytest.raises(Diverged, match="max_nonfinite_steps = 3"):
        learner.run()
    assert learner.clock == 5  # a skipped update advances the clock too


def test_a_stop_request_ends_it_without_an_error(tmp_path: Path) -> None:
    store = open_run(tmp_path)
    write_shards(store, 2)
    request_stop(store, reason="a sibling failed", source="actor-0-0", failed=True)
    learner = make_learner(store, make_config())
    learner.run()
    assert learner.clock < 6
    assert CheckpointStore(store).clocks()[-1] == learner.clock


def test_a_finished_run_started_again_ends_at_once_with_the_same_ledger(tmp_path: Path) -> None:
    store = open_run(tmp_path)
    write_shards(store, 13)
    first = make_learner(store, make_config())
    first.run()
    again = make_learner(store, make_config(), incarnation="l1")
    again.run()
    assert again.progress()["ledger"] == first.progress()["ledger"]
    np.testing.assert_array_equal(again.state["weights"], first.state["weights"])


def test_throttled_until_fresher_data_or_the_deadline(tmp_path: Path) -> None:
    store = open_run(tmp_path)
    write_shards(store, 12)
    limits = {"staleness.max_mean_staleness": 0.5, "staleness.max_throttle_seconds": 0.1, "learner.num_steps": 3}
    learner = make_learner(store, make_config(**limits))
    learner.run()
    assert [r["throttle_override"] for r in read_steps(store, 0)] == [False, True, True]
    assert learner.progress()["totals"]["num_overrides"] == 2


def test_a_buffer_too_small_for_its_batches_is_refused(tmp_path: Path) -> None:
    config = make_config(**{"learner.groups_per_batch": 4000, "actor.num_slots": 64})
    with pytest.raises(ConfigError, match=r"learner\.buffer_bytes"):
        make_learner(open_run(tmp_path), config)


def test_weights_do_change() -> None:
    """The fake trainer is worth comparing."""
    assert np.ptp(initial_weights()["weights"]) > 0


def test_the_pool_may_begin_while_the_learner_compiles(tmp_path: Path) -> None:
    """A writer that announced itself is live and has capacity before the first executable is there."""
    store, signals = open_run(tmp_path), []
    TrajectoryWriter(store, actor_id="actor_0_0", incarnation="a7")

    class SlowToCompile(NumpyTrainer):
        def compile(self, num_windows: int, window_tokens: int) -> None:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                signal = read_learner_signal(store)
                if signal is not None and signal.live_incarnations:
                    signals.append(signal)
                    break
            super().compile(num_windows, window_tokens)

    learner = make_learner(store, make_config(), trainer=SlowToCompile(), interrupted=lambda: True)
    with pytest.raises(Interrupted):
        learner.run()
    assert signals[0].live_incarnations == ["a7"]
    assert signals[0].capacity_groups == (signals[0].target + 1) * 2


def test_tokens_of_the_learners_own_version_are_marked(tmp_path: Path) -> None:
    """All data is of version 0: the first step starts from the weights that sampled it, no later one does."""

    class Measuring(NumpyTrainer):
        def step(self, state: Any, reference: Any, batch: Any, denominator: float) -> tuple[Any, Mapping[str, Any]]:
            state, values = super().step(state, reference, batch, denominator)
            gap = {"logprob_gap_equal_version": 0.0, "max_logprob_gap_equal_version": 0.0}
            return state, {**values, **gap, "equal_version_tokens": float((batch.equal_version > 0).sum())}

    store, trainer = open_run(tmp_path), Measuring()
    write_shards(store, 6)
    make_learner(store, make_config(**{"learner.num_steps": 3}), trainer=trainer).run()
    first, *later = trainer.batches
    np.testing.assert_array_equal(first.equal_version > 0, first.loss_mask)
    assert first.equal_version.any()
    assert not any(batch.equal_version.any() for batch in later)
    rows = read_metrics(store, "learner")
    for name in ("logprob_gap_equal_version", "max_logprob_gap_equal_version"):
        assert np.isnan(rows[name][:3]).tolist() == [False, True, True], "unknown, not 0"


def test_the_peak_is_measured_before_compilations_count(tmp_path: Path) -> None:
    store = open_run(tmp_path)
    write_shards(store, 4)
    config = make_config(**{"learner.num_steps": 2, "observability.peak_flops_per_second": 0.0})
    learner = make_learner(store, config)
    learner.run()
    progress = read_heartbeats(store)["learner"].progress
    assert progress["peak_flops_per_second"] > 0
    assert progress["model_flops_utilization"] > 0
    assert progress["compilations_after_warmup"] == 0

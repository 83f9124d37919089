"""Kill anywhere, restart: the same parameters to the bit, every trajectory once, the ledger exact."""

from pathlib import Path

import numpy as np
import pytest

from tests.learner import support
from tests.learner.support import (
    consumed_ids,
    initial_weights,
    make_config,
    make_learner,
    open_run,
    write_shards,
)
from tunix_core import paths
from tunix_core.errors import CorruptObject
from tunix_core.learner import checkpointing
from tunix_core.storage.checkpoints import CheckpointStore
from tunix_core.storage.quarantine import read_quarantine
from tunix_core.storage.step_records import read_steps
from tunix_core.storage.store import ObjectStore

CONFIG = make_config(**{"learner.num_steps": 9, "staleness.max_staleness": 12, "checkpoint.interval_steps": 3})


def run_killed(store: ObjectStore, where: str, clock: int, incarnation: str) -> None:
    support.run_killed(store, CONFIG, where=where, clock=clock, incarnation=incarnation)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, list, dict]:
    store = open_run(tmp_path_factory.mktemp("whole"))
    write_shards(store, 21)
    learner = make_learner(store, CONFIG)
    learner.run()
    return learner.state["weights"], consumed_ids(read_steps(store, 0)), learner.progress()["ledger"]


@pytest.mark.parametrize("where", ["_step", "_record", "_snapshot_if_due", "_checkpoint_if_due", "_guard"])
@pytest.mark.parametrize("clocks", [(1,), (4, 5), (3, 6, 7)])
def test_killed_anywhere_equals_uninterrupted(
    tmp_path: Path, uninterrupted: tuple, where: str, clocks: tuple[int, ...]
) -> None:
    weights, refs, ledger = uninterrupted
    store = open_run(tmp_path)
    write_shards(store, 21)
    for life, clock in enumerate(clocks):
        run_killed(store, where, clock, f"l{life}")
    last = make_learner(store, CONFIG, incarnation="last")
    last.run()
    np.testing.assert_array_equal(last.state["weights"], weights)
    assert consumed_ids(read_steps(store, 0)) == refs
    assert last.progress()["ledger"] == ledger


@pytest.mark.parametrize("order", ["oldest_first", "freshest_first", "largest_advantage_first"])
def test_a_killed_learner_that_uses_groups_twice_equals_an_uninterrupted_one(tmp_path: Path, order: str) -> None:
    """Few shards: without reuse there are groups for five steps."""
    options = {"staleness.consumption_order": order, "staleness.max_reuse": 2}
    config = make_config(
        **{"learner.num_steps": 6, "staleness.max_staleness": 12, "checkpoint.interval_steps": 3, **options}
    )
    found = []
    for name, kills in (("whole", ()), ("killed", (4, 5))):
        store = open_run(tmp_path / name)
        write_shards(store, 6)
        for life, clock in enumerate(kills):
            support.run_killed(store, config, where="_guard", clock=clock, incarnation=f"l{life}")
        last = make_learner(store, config, incarnation="last")
        last.run()
        records = [[(g["group_id"], g["uses"]) for g in r["groups"]] for r in read_steps(store, 0)]
        found.append((last.state["weights"], records, last.progress()["ledger"], last._buffer.ledger.reused))
    (weights, *whole), (again, *killed) = found
    assert whole == killed
    assert whole[2]["trajectories"] > 0
    np.testing.assert_array_equal(again, weights)


def test_shards_that_arrive_meanwhile_are_consumed_once(tmp_path: Path) -> None:
    """The step records name rows behind the checkpoint's cursors, and more data comes before the restart."""
    store = open_run(tmp_path)
    write_shards(store, 8)
    run_killed(store, "_step", 3, "l0")  # after a checkpoint at 3: its record 4 is written
    write_shards(store, 12, first=8, incarnation="a1")
    run_killed(store, "_step", 5, "l1")
    write_shards(store, 8, first=4, incarnation="a2")  # all duplicates
    last = make_learner(store, CONFIG, incarnation="last")
    last.run()
    refs = consumed_ids(read_steps(store, 0))
    assert len(refs) == len(set(refs)) == 36
    progress = last.progress()
    assert progress["ledger_trajectories"]["consumed"] == 36
    assert progress["ledger_trajectories"]["duplicate"] == 16
    assert progress["ledger_trajectories"]["surplus"] == 4
    assert progress["ledger"]["consumed"] == sum(sum(g["lengths"]) for r in read_steps(store, 0) for g in r["groups"])
    assert last._buffer.ledger.balanced


@pytest.mark.parametrize("num_spoiled", [1, 3])
def test_a_corrupt_checkpoint_is_passed_over(tmp_path: Path, uninterrupted: tuple, num_spoiled: int) -> None:
    """Back to the one before it, and from policy 0 where none is left."""
    store = open_run(tmp_path)
    write_shards(store, 21)
    run_killed(store, "_step", 8, "l0")
    clocks = CheckpointStore(store).clocks()
    assert clocks == [3, 6]
    for clock in clocks[-num_spoiled:]:
        (key,) = [k for k in store.list_after(paths.checkpoint(clock)) if k.endswith("buffer.json")]
        store.put(key, b"{}")
    lines: list[str] = []
    last = make_learner(store, CONFIG, incarnation="last", log=lines.append)
    last.run()
    assert sum("passed over checkpoint" in line for line in lines) == min(num_spoiled, 2)
    np.testing.assert_array_equal(last.state["weights"], uninterrupted[0])
    assert last.progress()["ledger"] == uninterrupted[2]


def test_replaying_all_records_gives_the_same_parameters(tmp_path: Path, uninterrupted: tuple) -> None:
    store = open_run(tmp_path)
    write_shards(store, 21)
    run_killed(store, "_checkpoint_if_due", 5, "l0")
    make_learner(store, CONFIG, incarnation="l1").run()
    for clock in CheckpointStore(store).clocks():
        for key in store.list_after(paths.checkpoint(clock)):
            store.delete(key)
    again = make_learner(store, CONFIG, incarnation="l2")
    again.run()
    assert again.progress()["totals"]["num_replayed_steps"] == 9
    np.testing.assert_array_equal(again.state["weights"], uninterrupted[0])


def test_a_shard_lost_from_under_the_buffer_is_counted_and_recorded(tmp_path: Path) -> None:
    store = open_run(tmp_path)
    write_shards(store, 24)
    run_killed(store, "_step", 3, "l0")
    lost = store.list_after(paths.TRAJECTORIES)[8]  # groups 16 and 17: buffered, in no record yet
    store.delete(lost)
    last = make_learner(store, CONFIG, incarnation="last")
    last.run()
    assert last.progress()["ledger_trajectories"]["quarantined"] == 4
    (entry,) = read_quarantine(store)
    assert (entry.shard, set(entry.rows)) == (lost, {0, 1, 2, 3})


def test_a_lost_shard_that_a_record_needs_ends_the_recovery(tmp_path: Path) -> None:
    """Going on would train on other data than before."""
    store = open_run(tmp_path)
    write_shards(store, 21)
    run_killed(store, "_step", 5, "l0")
    key = store.list_after(paths.TRAJECTORIES)[4]  # groups 8 and 9: step 5
    store.put(key, store.get(key)[:-7])
    with pytest.raises(CorruptObject, match=key):
        make_learner(store, CONFIG, incarnation="last").run()


def test_checkpoint_round_trip_and_foreign_shapes(tmp_path: Path) -> None:
    store = open_run(tmp_path)
    learner = make_learner(store, CONFIG)
    buffer, seen = learner._buffer.state()
    state = {"weights": initial_weights()["weights"], "step": np.asarray(4, np.int32)}
    saved = checkpointing.Checkpoint(clock=4, state=state, buffer=buffer, seen=seen, totals={"x": [1, 2.5]})
    checkpointing.save(store, saved, incarnation="l0")
    loaded, refused = checkpointing.load_newest(store)
    assert refused == []
    assert loaded is not None
    assert (loaded.clock, loaded.buffers, loaded.totals) == (4, [buffer], {"x": [1, 2.5]})
    for name, value in state.items():
        np.testing.assert_array_equal(loaded.state[name], value)
        assert loaded.state[name].dtype == value.dtype
    with pytest.raises(CorruptObject, match="weights: received"):
        learner._trainer.from_host({**state, "weights": np.zeros(3, np.float32)})

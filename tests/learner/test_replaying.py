"""A step again, from whatever checkpoint is left before it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.support import with_two_turns
from tests.learner.support import NumpyTrainer, initial_weights, make_config, make_learner, write_shards
from tunix_core.errors import ConfigError
from tunix_core.learner.credit import group_advantages
from tunix_core.learner.replaying import first_difference, replay_step
from tunix_core.storage.checkpoints import CheckpointStore
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.snapshots import SnapshotStore
from tunix_core.storage.step_records import read_steps
from tunix_core.storage.store import ObjectStore, open_store
from tunix_core.types import Trajectory


class RememberingTrainer(NumpyTrainer):
    """Keeps the weights after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[dict[str, np.ndarray]] = []

    def step(self, *arguments: Any) -> tuple[Any, Mapping[str, Any]]:
        state, metrics = super().step(*arguments)
        self.weights.append(self.tensors(state))
        return state, metrics


def paid_by_turn(trajectory: Trajectory) -> Trajectory:
    """0.25 or 1.25 in all, of which 0.25 early on; some have one turn only."""
    if trajectory.num_tokens % 3 == 0:
        return trajectory
    return with_two_turns(trajectory, 0.25, trajectory.reward)


@pytest.fixture
def trained(tmp_path: Path) -> ObjectStore:
    return train(tmp_path)


def train(folder: Path, **overrides: Any) -> ObjectStore:
    """Six steps, snapshots of all, checkpoints of some: of 2, 4 and 6 those that were not overtaken."""
    store = open_store(str(folder))
    PolicyStore(store).publish(0, initial_weights(), config={}, parent=None, publisher="test", gate={})
    config = make_config(**overrides)
    write_shards(store, 14, shaped=paid_by_turn)
    trainer = RememberingTrainer()
    make_learner(store, config, trainer=trainer, advantages=group_advantages(config.algorithm)).run()
    for version, weights in enumerate(trainer.weights, start=1):
        # A learner passes over a snapshot when the next one is due before it is written.
        SnapshotStore(store).write(version, weights, incarnation="test")
    return store


def again(store: ObjectStore, step: int, **overrides: Any):
    return replay_step(store, make_config(**overrides), NumpyTrainer(), initial_weights()["weights"], step)


def newest_before(store: ObjectStore, step: int) -> int:
    return max([clock for clock in CheckpointStore(store).clocks() if clock < step], default=0)


def test_every_step_is_identical_from_the_checkpoint_before_it(trained: ObjectStore) -> None:
    for step in range(1, 7):
        found = again(trained, step)
        assert (found.step, found.identical, found.difference) == (step, True, "")
        assert found.start == newest_before(trained, step)
        assert np.isfinite(found.metrics["loss"])
    assert newest_before(trained, 7) > 0


def test_a_batch_of_several_updates_is_cut_alike(tmp_path: Path) -> None:
    options = {"learner.updates_per_batch": 2}
    store = train(tmp_path, **options)
    assert all(again(store, step, **options).identical for step in range(1, 7))
    assert not again(store, 6).identical, "the cut matters"


def test_turns_with_advantages_of_their_own_come_back(tmp_path: Path) -> None:
    options = {"algorithm.advantage": "turn_level", "algorithm.discount": 0.5}
    store = train(tmp_path, **options)
    assert all(again(store, step, **options).identical for step in range(1, 7))
    recorded = np.array(read_steps(store, 0)[0]["groups"][0]["advantages"])
    assert recorded.shape == (2, 2), "trajectories, turns"


def test_rewards_for_a_value_head_come_back(tmp_path: Path) -> None:
    options = {"algorithm.advantage": "gae"}
    store = train(tmp_path, **options)
    assert all(again(store, step, **options).identical for step in range(1, 7))
    assert not again(store, 6).identical, "the rewards matter"


def test_a_checkpoint_that_is_gone_makes_the_way_longer(trained: ObjectStore) -> None:
    newest = newest_before(trained, 7)
    step = min(newest + 1, 6)
    CheckpointStore(trained).retire(newest_before(trained, step), reason="test")
    assert again(trained, step).start == newest_before(trained, step) < newest
    assert again(trained, step).identical


def test_a_difference_is_named(trained: ObjectStore) -> None:
    weights = SnapshotStore(trained).load(3)
    SnapshotStore(trained).delete(3)
    weights["weights"][7] += np.float32(0.5)
    SnapshotStore(trained).write(3, weights, incarnation="other")
    found = again(trained, 3)
    assert found.identical is False
    assert found.difference == "weights by up to 0.5"


def test_without_kept_weights_there_is_nothing_to_compare(trained: ObjectStore) -> None:
    SnapshotStore(trained).delete(3)
    assert again(trained, 3).identical is None


@pytest.mark.parametrize("step", [0, 7, -1])
def test_a_step_that_was_not_taken_is_refused(trained: ObjectStore, step: int) -> None:
    with pytest.raises(ConfigError, match=r"^--step: received .*1 to 6"):
        again(trained, step)


def test_first_difference_tells_sides_and_bits() -> None:
    one = {"a": np.float32([1, np.nan]), "b": np.float32([2])}
    assert first_difference(one, {name: value.copy() for name, value in one.items()}) == ""
    assert first_difference(one, {"a": one["a"]}) == "b is only on one side"
    assert first_difference(one, {**one, "b": np.float32([2.5])}) == "b by up to 0.5"

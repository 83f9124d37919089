"""Any step again: from the newest checkpoint before it through the step records, compared with the weights of that time.

A look back, beside a run or after it: nothing is written. On the same mesh and with the same flags the
weights are equal to the bit; where they are not, the first differing tensor is named.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping

import numpy as np

from tunix_core.config import RunConfig
from tunix_core.data.packing import window_sizes
from tunix_core.data.rows import RowFetcher
from tunix_core.errors import ConfigError, ObjectMissing
from tunix_core.learner.batches import batch_of_record
from tunix_core.learner.checkpointing import load_newest
from tunix_core.learner.trainer import State, Trainer
from tunix_core.storage.parts import Tensors
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.snapshots import SnapshotStore
from tunix_core.storage.step_records import read_steps
from tunix_core.storage.store import ObjectStore


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayedStep:
    """What came out of one step, executed again."""

    step: int
    start: int
    """Clock of the checkpoint it went on from; 0 is policy version 0."""
    metrics: Mapping[str, float]
    identical: bool | None
    """Whether the weights equal those kept of this clock, to the bit; None where none are."""
    difference: str
    """The first tensor that differs, and by how much."""


def replay_step(store: ObjectStore, config: RunConfig, trainer: Trainer, reference: object, step: int) -> ReplayedStep:
    """Execute the steps from the newest readable checkpoint before `step` up to it.

    Args:
        trainer: fresh; compiled here.
        reference: what the trainer's `reference` made of the run's KL reference.

    Raises:
        ConfigError: no such step, or neither a checkpoint before it nor policy version 0 is left.
        CorruptObject, ObjectMissing: shards of a step on the way are gone.
    """
    records = read_steps(store, 0)
    if not 1 <= step <= len(records):
        raise ConfigError("--step", step, f"1 to {len(records)}, the steps of this run", "Choose one of them.")
    for size in window_sizes(config):
        trainer.compile(size.counts[-1], size.tokens)
    start, state = _state_before(store, trainer, step)
    fetch = RowFetcher(store)
    metrics: Mapping[str, float] = {}
    for record in records[start:step]:
        batch = batch_of_record(record, fetch, config)
        state, values = trainer.step(state, reference, trainer.put(batch.arrays), batch.denominator)
        metrics = {name: float(value) for name, value in values.items()}
    published = _kept(store, step)
    difference = "" if published is None else first_difference(_whole(trainer.tensors(state)), published)
    return ReplayedStep(
        step=step,
        start=start,
        metrics=metrics,
        identical=None if published is None else not difference,
        difference=difference,
    )


def _state_before(store: ObjectStore, trainer: Trainer, step: int) -> tuple[int, State]:
    # Where the newest cannot be read, an older one makes the way longer, not wrong.
    checkpoint, _ = load_newest(store, before=step)
    if checkpoint is not None:
        return checkpoint.clock, trainer.from_host(checkpoint.state)
    policy_zero = _kept(store, 0)
    if policy_zero is None:
        raise ConfigError("--step", step, "a step behind a checkpoint that is kept", "Choose a later one.")
    return 0, trainer.initial_state(policy_zero)


def _whole(tensors: Tensors) -> dict[str, np.ndarray]:
    return {name: np.asarray(tensor) for name, tensor in tensors.items()}


def _kept(store: ObjectStore, version: int) -> Mapping[str, np.ndarray] | None:
    """The weights of that clock as published, or as the learner left them for publication."""
    for load in (lambda: PolicyStore(store).load(version)[0], lambda: SnapshotStore(store).load(version)):
        with contextlib.suppress(ObjectMissing):
            return load()
    return None


def first_difference(received: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> str:
    """Empty where all tensors are equal to the bit."""
    for name in sorted(expected.keys() | received.keys()):
        if name not in received or name not in expected:
            return f"{name} is only on one side"
        if received[name].tobytes() != expected[name].tobytes():
            largest = np.abs(received[name].astype(np.float64) - expected[name].astype(np.float64)).max()
            return f"{name} by up to {largest:.3g}"
    return ""

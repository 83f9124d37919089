"""A trainer in NumPy, and a run with shards for it: what the loop does shows without a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest

from tests.data.support import centered, make_group
from tunix_core.config import RunConfig
from tunix_core.config_loading import load_recipe
from tunix_core.data.buffer import GroupAdvantages
from tunix_core.data.packing import PackedArrays
from tunix_core.errors import CorruptObject
from tunix_core.learner.loop import Learner
from tunix_core.learner.trainer import check_leaves
from tunix_core.storage.store import ObjectStore, open_store
from tunix_core.storage.trajectory_writer import TrajectoryWriter
from tunix_core.types import Trajectory

VOCAB = 64


class NumpyTrainer:
    """State: `weights` float32 [VOCAB] and `step`; every token with an advantage moves its weight.

    The update depends on order and window layout (through the position), so a batch that is not
    repeated exactly shows.
    """

    def __init__(self, *, step_seconds: float = 0.0, nonfinite_from: int | None = None) -> None:
        self.compiled: dict[int, int] = {}
        """Tokens of a window -> windows."""
        self.batches: list[PackedArrays] = []
        self._step_seconds = step_seconds
        self._nonfinite_from = nonfinite_from

    def initial_state(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"weights": tensors["weights"].copy(), "step": np.zeros((), np.int32)}

    def reference(self, tensors: Mapping[str, np.ndarray]) -> Any:
        return tensors["weights"]

    def compile(self, num_windows: int, window_tokens: int) -> None:
        self.compiled[window_tokens] = num_windows

    def put(self, arrays: PackedArrays) -> Any:
        return arrays

    def step(
        self, state: Any, reference: Any, batch: PackedArrays, denominator: np.ndarray
    ) -> tuple[Any, Mapping[str, Any]]:
        num_windows, window_tokens = batch.tokens.shape
        assert num_windows <= self.compiled[window_tokens], "larger than what was compiled"
        assert denominator.sum() == batch.loss_mask.sum()
        assert reference.shape == (VOCAB,)
        self.batches.append(batch)
        time.sleep(self._step_seconds)
        weights, step = state.pop("weights"), state.pop("step")  # the old state is given away
        if self._nonfinite_from is not None and step >= self._nonfinite_from:
            return {"weights": weights, "step": step + 1}, {"loss": np.nan, "nonfinite": 1.0}
        mask = batch.loss_mask
        windows = np.arange(batch.tokens.shape[0])[:, None]
        signal = batch.advantages * (1 + 0.01 * windows) + 1e-3 * batch.behavior_logprobs
        if batch.rewards is not None:
            signal = signal + batch.rewards
        moved = np.zeros(VOCAB, np.float32)
        np.add.at(moved, batch.tokens[mask], signal[mask].astype(np.float32))
        divisor = denominator @ np.arange(1, 1 + len(denominator), dtype=np.float32)  # which update has what matters
        weights = (weights * np.float32(0.999) + moved / divisor).astype(np.float32)
        return {"weights": weights, "step": (step + 1).astype(np.int32)}, {"loss": float(moved.sum()), "nonfinite": 0.0}

    def tensors(self, state: Any) -> dict[str, np.ndarray]:
        return {"weights": state["weights"].copy()}

    def to_host(self, state: Any) -> dict[str, np.ndarray]:
        return {name: np.array(value) for name, value in state.items()}

    def from_host(self, arrays: Mapping[str, np.ndarray]) -> Any:
        if faults := check_leaves(self.initial_state(initial_weights()), arrays):
            raise CorruptObject("; ".join(faults))
        return {name: value.copy() for name, value in arrays.items()}


def make_config(**overrides: Any) -> RunConfig:
    return load_recipe(
        "lookup",
        {
            "model.vocab_size": VOCAB,
            "algorithm.group_size": 2,
            "learner.num_steps": 6,
            "learner.groups_per_batch": 2,
            "learner.window_tokens": 32,
            "learner.windows_per_microbatch": 1,
            "learner.max_windows": 4,
            "learner.buffer_bytes": 2**20,
            "actor.context_tokens": 16,
            "actor.num_groups": 1,
            "staleness.max_staleness": 5,
            "staleness.max_mean_staleness": 100.0,
            "staleness.control_interval_seconds": 0.05,
            "checkpoint.interval_steps": 2,
            "observability.peak_flops_per_second": 1e12,
            **overrides,
        },
    )


def write_shards(
    store: ObjectStore,
    num_groups: int,
    *,
    first: int = 0,
    version: int = 0,
    per_shard: int = 2,
    incarnation: str = "a0",
    longer: int = 0,
    shaped: Callable[[Trajectory], Trajectory] = lambda trajectory: trajectory,
) -> None:
    """Groups `g<first>…`, whole groups per shard, from one writer that ends; trajectories have 8 to 14 tokens and `longer`."""
    writer = TrajectoryWriter(store, actor_id="actor_0_0", incarnation=incarnation)
    numbers = list(range(first, first + num_groups))
    for start in range(0, num_groups, per_shard):
        trajectories = []
        for number in numbers[start : start + per_shard]:
            lengths = [longer + 8 + (number * 3) % 7, longer + 9 + (number * 5) % 6]
            trajectories += make_group(f"g{number:04d}", version=version, lengths=lengths)
        writer.write([shaped(trajectory) for trajectory in trajectories])
    writer.close()


def initial_weights() -> dict[str, np.ndarray]:
    return {"weights": np.linspace(-1, 1, VOCAB, dtype=np.float32)}


def make_learner(
    store: ObjectStore,
    config: RunConfig,
    *,
    trainer: Any = None,
    advantages: GroupAdvantages = centered,
    **kwargs: Any,
) -> Learner:
    kwargs = {"incarnation": "l0", "log": lambda _: None} | kwargs
    return Learner(
        store,
        config,
        trainer or NumpyTrainer(),
        advantages,
        policy_zero=initial_weights(),
        reference=initial_weights(),
        **kwargs,
    )


def open_run(folder: Path) -> ObjectStore:
    return open_store(str(folder / "run"))


def consumed_ids(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """`(shard, row)` in order of consumption; of the shard its name alone, which does not change with the hour."""
    return [(PurePosixPath(g["shard"]).name, row) for record in records for g in record["groups"] for row in g["rows"]]


class Killed(BaseException):
    """Ends a learner where it stands."""


def run_killed(store: ObjectStore, config: RunConfig, *, where: str, clock: int, incarnation: str) -> None:
    """Run a learner that dies in the method `where` once its clock is `clock`."""
    learner = make_learner(store, config, incarnation=incarnation)
    original = getattr(learner, where)

    def die(*args: Any, **kwargs: Any) -> Any:
        if learner.clock >= clock:  # its records may be one step ahead of it, and are executed first
            raise Killed
        return original(*args, **kwargs)

    setattr(learner, where, die)
    with pytest.raises(Killed):
        learner.run()
    learner._checkpoints.finish()  # whether it got through is another test's matter

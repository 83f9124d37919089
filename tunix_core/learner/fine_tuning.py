"""Supervised training on a fixed set of examples: epochs, batches, held-out loss. No actor, no staleness.

The batches of a run follow from its seed and its examples alone. A run that was stopped starts over.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tunix_core.config import FineTuneConfig, RunConfig
from tunix_core.data.packing import PackedArrays, best_fit
from tunix_core.distributed.mesh import make_local_mesh
from tunix_core.errors import ConfigError, Diverged
from tunix_core.learner.examples import Example, lengths_of, num_tokens, pack_examples
from tunix_core.learner.held_out_loss import HeldOutLoss
from tunix_core.learner.objectives import Objective, preference_objective, supervised_objective
from tunix_core.learner.train_step import TrainStep, make_optimizer
from tunix_core.learner.update import TrainState
from tunix_core.models.parameters import Params

Figures = Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """What is minimised."""

    objective: Objective
    denominator: Callable[[PackedArrays], float]
    """What the loss of a batch is a mean over; one for the whole batch."""
    compares_with_the_start: bool = False
    """Whether the objective reads a reference: the weights that training started from."""


def supervised_fine_tuning(config: RunConfig) -> Method:
    """Cross entropy, the mean over the assistant's tokens."""
    return Method(
        objective=supervised_objective(config.model), denominator=lambda arrays: float(arrays.loss_mask.sum())
    )


def preference_optimization(config: RunConfig) -> Method:
    """DPO, the mean over pairs."""
    return Method(
        objective=preference_objective(config.model, config.preferences),
        denominator=lambda arrays: float((arrays.segment_ids.max(axis=1) // 2).sum()),
        compares_with_the_start=True,
    )


class Split(NamedTuple):
    """Examples by what becomes of them."""

    train: list[Example]
    held_out: list[Example]
    num_overlong: int
    """Longer than a window; in neither."""


def split(examples: Sequence[Example], config: RunConfig) -> Split:
    """Take out what fits no window, then draw the held-out share.

    Raises:
        ConfigError: nothing is left to train on.
    """
    fitting = [example for example in examples if num_tokens(example) <= config.learner.window_tokens]
    num_held_out = int(np.ceil(len(fitting) * config.fine_tune.held_out_fraction))
    if num_held_out >= len(fitting):
        raise ConfigError(
            "--data",
            f"{len(examples)} examples, {len(fitting)} of which fit a window of {config.learner.window_tokens} tokens",
            f"at least {max(1, num_held_out + 1)} that fit, with {num_held_out} held out",
            "Give more examples, raise learner.window_tokens or lower fine_tune.held_out_fraction.",
        )
    order = np.random.default_rng([config.seed, 0]).permutation(len(fitting)).tolist()
    chosen = set(order[:num_held_out])
    return Split(
        train=[example for i, example in enumerate(fitting) if i not in chosen],
        held_out=[fitting[i] for i in sorted(chosen)],
        num_overlong=len(examples) - len(fitting),
    )


class Planned(NamedTuple):
    """A step to come."""

    epoch: int
    """From 0."""
    examples: np.ndarray  # int64 [n] indices


def schedule(num_examples: int, options: FineTuneConfig, seed: int) -> list[Planned]:
    """Every step: each epoch goes through all examples once, in an order of its own."""

    def steps() -> Iterator[Planned]:
        for epoch in range(options.num_epochs):
            order = np.random.default_rng([seed, 1 + epoch]).permutation(num_examples)
            for first in range(0, num_examples, options.examples_per_step):
                yield Planned(epoch, order[first : first + options.examples_per_step])

    return list(itertools.islice(steps(), options.num_steps or None))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuned:
    """What came out."""

    params: Params
    """Host arrays: whole weights, or adapters where those are trained."""
    num_steps: int
    figures: Figures
    """Of the last step, and of the held-out examples at the end."""


class _Trainer:
    """The compiled step and the packed held-out examples of one run."""

    def __init__(self, config: RunConfig, method: Method, data: Split, plan: Sequence[Planned]) -> None:
        config, mesh = make_local_mesh(config)
        self._config = config
        self._method = method
        self._data = data
        self.step = TrainStep(config, mesh, objective=method.objective, optimizer=make_optimizer(config.optimizer))
        lengths = lengths_of(data.train)
        # The batches are known, so the largest is: nothing compiles once training has begun.
        self.step.compile(max(self._num_windows(lengths[planned.examples]) for planned in plan))
        self._held_out: HeldOutLoss | None = None
        if data.held_out:
            arrays = self._pack(data.held_out)
            self._held_out = HeldOutLoss(self.step, arrays, method.denominator(arrays))

    def _num_windows(self, lengths: np.ndarray) -> int:
        """In whole micro-batches."""
        unit = self._config.microbatch_windows
        return -(-best_fit(lengths, self._config.learner.window_tokens).num_windows // unit) * unit

    def _pack(self, examples: Sequence[Example]) -> PackedArrays:
        return pack_examples(examples, self._num_windows(lengths_of(examples)), self._config.learner.window_tokens)

    def reference(self, start: Params, base: Params | None) -> Params | None:
        """On the mesh; None where the objective reads none."""
        if base is not None:
            return self.step.put_reference(base)
        return self.step.put_reference(start) if self._method.compares_with_the_start else None

    def update(
        self, state: TrainState, reference: Params | None, planned: Planned
    ) -> tuple[TrainState, dict[str, float]]:
        arrays = self._pack([self._data.train[i] for i in planned.examples.tolist()])
        state, metrics = self.step(state, reference, self.step.put(arrays), self._method.denominator(arrays))
        return state, {name: float(value) for name, value in jax.device_get(dict(metrics)).items()}

    def evaluate(self, state: TrainState, reference: Params | None) -> dict[str, float]:
        if self._held_out is None:
            return {}
        return self._held_out(state, reference)


def fine_tune(
    config: RunConfig,
    method: Method,
    data: Split,
    *,
    start: Params,
    base: Params | None,
    record: Callable[[Figures], None],
    report: Callable[[dict[str, Any]], None],
) -> FineTuned:
    """Train through the schedule.

    Args:
        start: what is trained, on the host: whole weights, or adapters on `base`.
        record: called after each step with its metrics.
        report: called at the start, at each evaluation and at the end, with `num_steps`, `total_steps`, the figures
            of the last step (none at the start) and the held-out ones (none without held-out examples).

    Raises:
        Diverged: too many non-finite updates in a row.
    """
    plan = schedule(len(data.train), config.fine_tune, config.seed)
    trainer = _Trainer(config, method, data, plan)
    state = trainer.step.init_state(start)
    reference = trainer.reference(start, base)
    figures: dict[str, float] = trainer.evaluate(state, reference)
    report({"num_steps": 0, "total_steps": len(plan), **figures})
    num_skipped = 0
    for done, planned in enumerate(plan, start=1):
        state, metrics = trainer.update(state, reference, planned)
        num_skipped = num_skipped + 1 if metrics["nonfinite"] else 0
        if num_skipped >= config.learner.max_nonfinite_steps:
            raise Diverged(
                f"fine-tuning: {num_skipped} non-finite updates in a row at step {done}, accepted fewer than "
                f"learner.max_nonfinite_steps = {config.learner.max_nonfinite_steps}. Lower optimizer.learning_rate."
            )
        due = done == len(plan) or done % config.fine_tune.evaluate_every_steps == 0
        held_out = trainer.evaluate(state, reference) if due else {}
        record({"step": done, "epoch": planned.epoch, **metrics, **held_out})
        if due:
            figures = {**metrics, **held_out}
            report({"num_steps": done, "total_steps": len(plan), **figures})
    params = jax.tree.map(lambda leaf: np.array(leaf), state.params)
    return FineTuned(params=params, num_steps=len(plan), figures=figures)

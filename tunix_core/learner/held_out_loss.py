"""The loss on examples that are never trained on: a forward pass over their windows."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from tunix_core.data.packing import PackedArrays
from tunix_core.learner.objectives import finalize
from tunix_core.learner.train_step import TrainStep
from tunix_core.learner.update import TrainState
from tunix_core.models.parameters import Params


class HeldOutLoss:
    """Of a step's objective, over batches of the shape that the step was compiled for."""

    def __init__(self, step: TrainStep, arrays: PackedArrays, denominator: float) -> None:
        """
        Args:
            arrays: the examples, `[N, W]`.
            denominator: of all of them.
        """
        self._step = step
        self._denominator = denominator
        size = step.num_windows
        self._batches = [
            step.put(jax.tree.map(lambda array, first=first: array[first : first + size], arrays))
            for first in range(0, len(arrays.tokens), size)
        ]

    def __call__(self, state: TrainState, reference: Params | None) -> dict[str, float]:
        """`held_out_loss`, and the objective's own figures, `held_out_…` too."""
        totals: dict[str, Any] = {}
        for batch in self._batches:
            sums = jax.device_get(self._step.held_out(state, reference, batch))
            totals = {name: totals.get(name, np.float64(0)) + np.float64(value) for name, value in sums.items()}
        loss = totals.pop("loss") / self._denominator
        return {f"held_out_{name}": float(value) for name, value in {"loss": loss, **finalize(totals)}.items()}

"""The loss on examples that are never trained on: a forward pass over their windows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tunix_core.config import RunConfig
from tunix_core.data.packing import PackedArrays
from tunix_core.distributed.mesh import REPLICATED, WINDOWS, placed
from tunix_core.learner.objectives import Batch, Objective, Sums, finalize
from tunix_core.learner.train_step import over_devices
from tunix_core.models.parameters import Params


class HeldOutLoss:
    """Of one objective on one mesh; compiled for one micro-batch, at the first call."""

    def __init__(
        self, config: RunConfig, mesh: Mesh, objective: Objective, arrays: PackedArrays, denominator: float
    ) -> None:
        """
        Args:
            arrays: the examples, `[N, W]`, N whole micro-batches.
            denominator: of all of them.
        """
        unit = config.microbatch_windows
        assert len(arrays.tokens) % unit == 0, "whole micro-batches"
        self._denominator = denominator
        place = placed(mesh, WINDOWS)
        whole = Batch(*(getattr(arrays, name) for name in Batch._fields))
        self._microbatches = [
            jax.tree.map(lambda array, first=first: jax.device_put(array[first : first + unit], place), whole)
            for first in range(0, len(arrays.tokens), unit)
        ]

        def evaluate(params: Params, reference: Params, windows: Batch) -> Sums:
            loss, sums = objective(params, reference, windows, jnp.float32(1))
            return over_devices({"loss": loss, **sums})

        self._evaluate = jax.jit(
            jax.shard_map(
                evaluate, mesh=mesh, in_specs=(REPLICATED, REPLICATED, WINDOWS), out_specs=REPLICATED, check_vma=True
            )
        )

    def __call__(self, params: Params, reference: Params) -> dict[str, float]:
        """`held_out_loss`, and the objective's own figures, `held_out_…` too."""
        totals: dict[str, Any] = {}
        for windows in self._microbatches:
            sums = jax.device_get(self._evaluate(params, reference, windows))
            totals = {name: totals.get(name, 0.0) + np.float64(value) for name, value in sums.items()}
        loss = totals.pop("loss") / self._denominator
        return {f"held_out_{name}": float(value) for name, value in {"loss": loss, **finalize(totals)}.items()}

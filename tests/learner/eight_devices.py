"""Runs in a process of its own, under XLA_FLAGS=--xla_force_host_platform_device_count=8.

`python -m tests.learner.eight_devices FILE`: one update of the same state on meshes of 2 and 8 data
shards, each repeated, and a batch of two updates; writes parameters and metrics of each to an `.npz`.
"""

from __future__ import annotations

import dataclasses
import sys

import jax
import numpy as np
from jax.sharding import AxisType

from tests.learner.step_cases import make_config, make_parameters, make_sequences, two_updates, two_updates_step
from tunix_core.config import MeshConfig
from tunix_core.distributed.mesh import AXES, make_mesh
from tunix_core.learner.train_step import make_train_step
from tunix_core.models.decoder import flatten_parameters

SHARDS = (2, 8)
WINDOWS = 8
"""Of a micro-batch over all devices, in the batch of two updates."""


def main(path: str) -> None:
    assert len(jax.devices()) == 8
    arrays = {}
    for shards in SHARDS:
        # 1 window in a micro-batch: 5 windows on 8 devices leave three of them without any.
        config = dataclasses.replace(make_config(windows_per_microbatch=1), mesh=MeshConfig(data=shards))
        if shards == 8:
            mesh = make_mesh(config.mesh)
        else:
            kinds = (AxisType.Auto,) * len(AXES)
            mesh = jax.make_mesh((shards, 1, 1, 1), AXES, axis_types=kinds, devices=jax.devices()[:shards])
        step = make_train_step(config, mesh)
        step.compile(16)
        batch = step.put(make_sequences().pack())
        reference = step.put_reference(make_parameters(2))
        for attempt in range(2):
            state, metrics = step(
                step.init_state(make_parameters(1)), reference, batch, float(make_sequences().loss_mask.sum())
            )
            for name, leaf in flatten_parameters(state.params).items():
                arrays[f"{shards}/{attempt}/params/{name}"] = leaf
            for name, value in metrics.items():
                arrays[f"{shards}/{attempt}/metrics/{name}"] = np.asarray(value)
        params, figures = two_updates(two_updates_step(WINDOWS // shards, mesh), make_sequences(24))
        arrays |= {f"two/{shards}/params/{name}": leaf for name, leaf in params.items()}
        arrays |= {f"two/{shards}/metrics/{name}": np.asarray(value) for name, value in figures.items()}
    np.savez(path, **arrays)


if __name__ == "__main__":
    main(sys.argv[1])

"""The device mesh, and where a batch lies on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tunix_core.config import MeshConfig, RunConfig
from tunix_core.distributed.parallel import WINDOW_AXES, Parallel
from tunix_core.errors import ConfigError
from tunix_core.mesh_config import AXES

REPLICATED = PartitionSpec()


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over `devices`, by default all of all processes. Slices of a TPU are joined along `data`.

    Raises:
        ConfigError: the axes' product is not the number of devices, or `data` not a multiple of the slices.
    """
    devices = jax.devices() if devices is None else devices
    if config.num_devices != len(devices):
        raise ConfigError(
            "mesh",
            config.sizes,
            f"axes whose product is the number of devices, {len(devices)}",
            "Change the axes of mesh, or the devices that the process sees.",
        )
    shape, kinds = tuple(config.sizes.values()), (AxisType.Auto,) * len(AXES)
    if devices[0].platform == "tpu":
        return Mesh(_along_links(shape, devices), AXES, axis_types=kinds)
    return jax.make_mesh(shape, AXES, axis_types=kinds, devices=devices)


def has_mesh(config: MeshConfig) -> bool:
    """This process sees the devices of the mesh; of one over several hosts, only a learner that met the others does."""
    return config.num_devices == len(jax.devices())


def make_local_mesh(config: RunConfig) -> tuple[RunConfig, Mesh]:
    """For tasks of one process: the learner's mesh, or where that reaches over several hosts one device.

    Returns:
        The configuration with that mesh, and the mesh.

    Raises:
        ConfigError: the process has more devices than the mesh.
    """
    if config.mesh.num_devices <= len(jax.devices()):
        return config, make_mesh(config.mesh)
    alone = dataclasses.replace(config, mesh=MeshConfig())
    return alone, make_mesh(alone.mesh, jax.devices()[:1])


def _along_links(shape: tuple[int, ...], devices: Sequence[Any]) -> Any:
    """TPU devices `[data, fsdp, stage, tensor]`, neighbours in the mesh near each other in the torus.

    An axis may take part of a dimension of the torus, as fsdp = tensor = 8 of 4x4x4 do.
    """
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    if num_slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    if shape[0] % num_slices:
        raise ConfigError(
            "mesh.data", shape[0], f"a multiple of the {num_slices} slices", "Other axes stay inside a slice's links."
        )
    inside = (shape[0] // num_slices, *shape[1:])
    across = (num_slices, 1, 1, 1)
    return mesh_utils.create_hybrid_device_mesh(inside, across, devices, allow_split_physical_axes=True)


def parallel_of(mesh: Mesh) -> Parallel:
    """The sizes of its axes; an axis that it lacks has one device."""
    return Parallel(**{axis: mesh.shape.get(axis, 1) for axis in AXES})


def windows_spec(parallel: Parallel) -> PartitionSpec:
    """Of `[N, W]` batch arrays: windows are split over data and fsdp, and the same on all stages and tensor devices."""
    return PartitionSpec(parallel.active(WINDOW_AXES) or None)


def placed(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(mesh, spec)

"""The device mesh, and where a batch lies on it."""

from __future__ import annotations

import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tunix_core.config import MeshConfig
from tunix_core.distributed.parallel import AXES, WINDOW_AXES, Parallel
from tunix_core.errors import ConfigError

REPLICATED = PartitionSpec()


def make_mesh(config: MeshConfig) -> Mesh:
    """A mesh over all devices of all processes.

    Raises:
        ConfigError: the axes' product is not the number of devices.
    """
    shape = tuple(getattr(config, axis) for axis in AXES)
    devices = jax.devices()
    if math.prod(shape) != len(devices):
        raise ConfigError(
            "mesh",
            dict(zip(AXES, shape, strict=True)),
            f"axes whose product is the number of devices, {len(devices)}",
            "Change the axes of mesh, or the devices that the process sees.",
        )
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def parallel_of(mesh: Mesh) -> Parallel:
    """The sizes of its axes; an axis that it lacks has one device."""
    return Parallel(**{axis: mesh.shape.get(axis, 1) for axis in AXES})


def windows_spec(parallel: Parallel) -> PartitionSpec:
    """Of `[N, W]` batch arrays: windows are split over data and fsdp, and the same on all stages and tensor devices."""
    return PartitionSpec(parallel.active(WINDOW_AXES) or None)


def placed(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(mesh, spec)

"""The device mesh, and where arrays lie on it."""

from __future__ import annotations

import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tunix_core.config import MeshConfig
from tunix_core.errors import ConfigError

AXES = ("data", "fsdp", "stage", "tensor")

WINDOW_AXES = ("data", "fsdp")
"""The axes that windows are split over; gradients are summed over the same."""

WINDOWS = PartitionSpec(WINDOW_AXES)
"""`[N, W]` batch arrays."""

REPLICATED = PartitionSpec()
"""Parameters, optimizer state and scalars, in this release: the mesh has only its data axis above 1."""


def make_mesh(config: MeshConfig) -> Mesh:
    """A mesh over all devices of the process.

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
            "Change mesh.data or the devices that the process sees.",
        )
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def placed(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(mesh, spec)

"""What one device's program knows of the mesh around it: axis sizes, and the collectives that follow from them.

An axis of one device is left out of every type and collective, so that a single device compiles
the program that it would without a mesh, and the models run outside `shard_map` as they are.

Inside, parameters are cast to varying over all axes before anything uses them: every gradient is then the device's own part
and is summed once, explicitly, over the axes on which the parameter is the same. (FACTS: without types that
are checked, the loss was exact and the gradients silently wrong.)

Along `tensor` activations are split by tokens wherever they are normalised and added (sequence parallelism,
Korthikanti et al., arXiv:2205.05198) and whole where columns of weights meet them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from tunix_core.mesh_config import AXES

WINDOW_AXES = ("data", "fsdp")
"""The axes that windows are split over."""

LOSS_AXES = ("data", "fsdp", "stage")
"""The axes over which parts of the loss add up; along `tensor` it is the same everywhere."""


def varying_over(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """`x` varying over `axes` too."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def as_varying(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x` varying over the axes that `like` varies over too: what a loop's carry must match."""
    return varying_over(x, varying_axes(like))


def varying_axes(x: Any) -> tuple[str, ...]:
    """Of an array, or of what `jax.eval_shape` says of it."""
    kind = x.manual_axis_type if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x).manual_axis_type
    return tuple(sorted(kind.varying)) if kind else ()


def zeros_of(shapes: Any, dtype: Any = None, *, num_rows: int | None = None) -> Any:
    """Zeros of the shapes and types of arrays, or of what `jax.eval_shape` found, varying over the same axes.

    Args:
        dtype: instead of theirs.
        num_rows: the length of the first axis instead of theirs.
    """

    def zeros(leaf: Any) -> jax.Array:
        shape = leaf.shape if num_rows is None else (num_rows, *leaf.shape[1:])
        return varying_over(jnp.zeros(shape, dtype or leaf.dtype), varying_axes(leaf))

    return jax.tree.map(zeros, shapes)


def only_where(predicate: jax.Array, function: Callable[..., Any], *operands: Any) -> Any:
    """`function(*operands)` on the devices where `predicate` holds, zeros and no work on the others.

    All devices that a collective inside connects must agree on it.
    """
    shapes = jax.eval_shape(function, *operands)
    return jax.lax.cond(predicate, function, lambda *_: zeros_of(shapes), *operands)


@dataclasses.dataclass(frozen=True)
class Parallel:
    """Devices along each mesh axis."""

    data: int = 1
    fsdp: int = 1
    stage: int = 1
    tensor: int = 1

    def active(self, axes: Iterable[str] = AXES) -> tuple[str, ...]:
        """Those of `axes` with more than one device, in the mesh's order whatever theirs: a set's differs from process to
        process, and then their programs do, and their collectives never meet."""
        chosen = set(axes)
        return tuple(axis for axis in AXES if axis in chosen and getattr(self, axis) > 1)

    def vary(self, tree: Any) -> Any:
        """Every leaf varying over all axes."""
        return jax.tree.map(lambda leaf: varying_over(leaf, self.active()), tree)

    def index(self, axis: str) -> Any:
        """This device's place on an axis."""
        return jax.lax.axis_index(axis) if getattr(self, axis) > 1 else 0

    def total(self, x: jax.Array, axes: Iterable[str]) -> jax.Array:
        """The sum over the devices of `axes`."""
        active = self.active(axes)
        return jax.lax.psum(varying_over(x, active), active) if active else x

    def largest(self, x: jax.Array, axes: Iterable[str]) -> jax.Array:
        """The maximum over the devices of `axes`."""
        active = self.active(axes)
        return jax.lax.pmax(varying_over(x, active), active) if active else x

    def enter(self, x: jax.Array) -> jax.Array:
        """All tokens `[B, T, …]` of the tensor devices' parts `[B, T / tensor, …]`."""
        return jax.lax.all_gather(x, "tensor", axis=1, tiled=True) if self.tensor > 1 else x

    def leave(self, x: jax.Array) -> jax.Array:
        """This device's tokens `[B, T / tensor, …]` of the sum over tensor devices of `[B, T, …]`."""
        return jax.lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True) if self.tensor > 1 else x

    def whole(self, x: jax.Array) -> jax.Array:
        """All tokens `[B, T, …]`, of a type that says they are the same on all tensor devices."""
        return jax.lax.all_gather(x, "tensor", axis=1, tiled=True, to="invarying") if self.tensor > 1 else x

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """A weight whole along its axis that is split over fsdp; its gradient is summed and split again."""
        return jax.lax.all_gather(x, "fsdp", axis=axis, tiled=True) if self.fsdp > 1 else x

    def to_next_stage(self, x: jax.Array) -> jax.Array:
        return self._passed(x, 1)

    def to_previous_stage(self, x: jax.Array) -> jax.Array:
        return self._passed(x, -1)

    def _passed(self, x: jax.Array, by: int) -> jax.Array:
        ring = [(i, (i + by) % self.stage) for i in range(self.stage)]
        return jax.lax.ppermute(x, "stage", ring)


ALONE = Parallel()

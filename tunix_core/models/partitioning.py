"""Which axis of which parameter is split over which mesh axis: one table.

`tensor` splits heads, MLP columns and the vocabulary (Megatron, arXiv:1909.08053); `fsdp` splits what is model
width wide, and a layer's weights are whole only while it runs (ZeRO-3, arXiv:1910.02054); `stage` splits the layers.
What names none of them is the same everywhere. The optimizer's moments lie as their parameters do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from tunix_core.distributed.parallel import Parallel

Axes = tuple[str | None, ...]

COLUMNS, ROWS = r"(query|key|value|gate|up)", r"(output|down)"
"""Projections from the model's width, and those back to it."""

TABLE: tuple[tuple[str, Axes], ...] = (
    (r"embedding", ("tensor", "fsdp")),
    (r"head", ("fsdp", "tensor")),
    (r"final_norm\.scale", (None,)),
    (r"value_head\.weight", (None,)),
    (r"value_head\.bias", ()),
    (rf"blocks\.\w+\.{COLUMNS}\.weight", ("stage", "fsdp", "tensor")),
    (rf"blocks\.\w+\.{COLUMNS}\.bias", ("stage", "tensor")),
    (rf"blocks\.\w+\.{COLUMNS}\.lora_a", ("stage", "fsdp", None)),
    (rf"blocks\.\w+\.{COLUMNS}\.lora_b", ("stage", None, "tensor")),
    (rf"blocks\.\w+\.{ROWS}\.weight", ("stage", "tensor", "fsdp")),
    (rf"blocks\.\w+\.{ROWS}\.lora_a", ("stage", "tensor", None)),
    (rf"blocks\.\w+\.{ROWS}\.lora_b", ("stage", None, "fsdp")),
    (r"blocks\.mlp\.router", ("stage", None, None)),
    (r"blocks\.mlp\.(gate|up)", ("stage", None, "fsdp", "tensor")),
    (r"blocks\.mlp\.down", ("stage", None, "tensor", "fsdp")),
    (r"blocks\.(\w+\.)?\w*norm\.scale", ("stage", None)),
)
"""Parameter -> what splits each of its axes. The first row that matches the whole name counts."""


def axes_of(name: str) -> Axes:
    """The row of a parameter's dotted name."""
    for pattern, axes in TABLE:
        if re.fullmatch(pattern, name):
            return axes
    raise AssertionError(f"{name} has no row in the table of partitions")


def map_named(function: Callable[[str, Any], Any], tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`function(dotted name, leaf)` of every leaf, in a tree of the same form."""
    return {
        name: map_named(function, value, f"{prefix}{name}.")
        if isinstance(value, Mapping)
        else function(prefix + name, value)
        for name, value in tree.items()
    }


def partition_specs(params: Mapping[str, Any], parallel: Parallel) -> dict[str, Any]:
    """A tree like `params` of specs; mesh axes of one device are left out."""

    def spec(name: str, _: Any) -> PartitionSpec:
        return PartitionSpec(*(axis if axis and getattr(parallel, axis) > 1 else None for axis in axes_of(name)))

    return map_named(spec, params)


def is_product(name: str) -> bool:
    """It is used in matrix products (or looked up), in the compute type; others are used in float32."""
    return "fsdp" in axes_of(name) or "tensor" in axes_of(name)


def gather_layer(layer: Mapping[str, Any], parallel: Parallel, compute_dtype: Any) -> dict[str, Any]:
    """One layer's weights (no leading L), whole along fsdp; what travels is in the compute type."""

    def whole(name: str, leaf: jax.Array) -> jax.Array:
        axes = axes_of(name)[1:]
        if "fsdp" not in axes:
            return leaf
        gathered = parallel.gather(leaf.astype(compute_dtype), axes.index("fsdp"))
        return checkpoint_name(gathered, GATHERED)

    return map_named(whole, layer, "blocks.") if parallel.fsdp > 1 else dict(layer)


GATHERED = "gathered"
"""Weights that a layer gathered: never kept for the backward pass, which gathers them again."""


def as_differentiated(params: Mapping[str, Any], compute_dtype: Any) -> dict[str, Any]:
    """Weights as their gradients are taken: as used, but for the embedding, whose gradient adds up over tokens."""
    return as_used(params, compute_dtype, keep=("embedding",))


def as_used(params: Mapping[str, Any], compute_dtype: Any, *, keep: tuple[str, ...] = ()) -> dict[str, Any]:
    """Weights as forward passes use them: those of products in the compute type already.

    Args:
        keep: names that stay as they are.
    """

    def used(name: str, leaf: Any) -> Any:
        if name in keep or not is_product(name):
            return leaf
        dtype = np.dtype(compute_dtype)
        return jax.ShapeDtypeStruct(leaf.shape, dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf.astype(dtype)

    return map_named(used, params)

"""What a step may gather: a layer's weights along fsdp, embedding and head along fsdp, tokens along tensor. Nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tunix_core.config import RunConfig
from tunix_core.models.parameters import abstract_parameters, named_leaves
from tunix_core.models.partitioning import axes_of
from tunix_core.planning.hlo import Array, Collective

SMALL = 2**16
"""Elements of what is not worth a rule: scalars, norms, a window's figures."""


def weights_in_use(config: RunConfig) -> dict[int, str]:
    """Elements -> name, of the weights that a device may hold whole along fsdp: of one layer, embedding, head."""
    found = {}
    for name, leaf in named_leaves(abstract_parameters(config.model)).items():
        axes, shape = axes_of(name), leaf.shape
        if "fsdp" not in axes:
            continue
        if axes[0] == "stage":
            axes, shape = axes[1:], shape[1:]
        found[math.prod(shape) // (config.mesh.tensor if "tensor" in axes else 1)] = name
    return found


def _is_allowed(array: Array, axes: tuple[str, ...], weights: dict[int, str], num_tokens: int, width: int) -> bool:
    if array.num_elements <= SMALL:
        return True
    if axes == ("fsdp",):
        return array.num_elements in weights
    return axes == ("tensor",) and array.num_elements in (num_tokens, num_tokens * width)


def misplaced(config: RunConfig, found: Iterable[Collective]) -> list[str]:
    """A line per gathered array that is none of those, such as the weights of several layers at once."""
    weights = weights_in_use(config)
    num_tokens = config.learner.windows_per_microbatch * config.learner.window_tokens
    return [
        f"all-gather over {'+'.join(one.axes) or 'no axis'} gives {array.dtype}{list(array.shape)}"
        for one in found
        if one.kind == "all-gather"
        for array in one.results
        if not _is_allowed(array, one.axes, weights, num_tokens, config.model.model_width)
    ]

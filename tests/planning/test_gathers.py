"""What a step may gather, and what it may not."""

from __future__ import annotations

from typing import Any

import pytest

from tunix_core.planning.gathers import misplaced
from tunix_core.planning.hlo import Array, Collective
from tunix_core.planning.presets import planned_config

CONFIG = planned_config(
    "llama3-8b", {"mesh.fsdp": 4, "mesh.tensor": 2, "learner.window_tokens": 4096, "learner.max_windows": 64}
)


def gathered(axes: tuple[str, ...], *shape: int) -> list[str]:
    return misplaced(CONFIG, [Collective("all-gather", axes, (Array("bf16", shape),), 1, 1, True)])


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        (("fsdp",), (4096, 14336 // 2)),  # a layer's gate
        (("fsdp",), (1, 14336 // 2, 4096)),  # its down projection
        (("fsdp",), (128256 // 2, 4096)),  # the embedding
        (("tensor",), (1, 4096, 4096)),  # tokens
        (("data", "fsdp"), (64,)),  # a figure
    ],
)
def test_a_layer_and_its_tokens_may_be_gathered(axes: tuple[str, ...], shape: Any) -> None:
    assert gathered(axes, *shape) == []


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        (("fsdp",), (32, 4096, 14336 // 2)),  # all layers
        (("tensor",), (4096, 14336)),  # a weight that tensor splits
        (("fsdp", "tensor"), (4096, 14336)),
        (("fsdp",), (4096, 14336)),
        (("stage",), (32, 4096, 14336 // 2)),
    ],
)
def test_whole_parameters_may_not(axes: tuple[str, ...], shape: Any) -> None:
    (line,) = gathered(axes, *shape)
    assert str(list(shape)) in line

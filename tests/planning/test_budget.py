"""Bytes of a device, counted from shapes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest

from tunix_core.config import RunConfig
from tunix_core.distributed.mesh import make_mesh
from tunix_core.learner.train_step import make_train_step
from tunix_core.models.parameters import named_leaves
from tunix_core.models.partitioning import axes_of
from tunix_core.planning.budget import budget
from tunix_core.planning.presets import planned_config

SMALL = {
    "model.num_layers": 4,
    "model.model_width": 256,
    "model.vocab_size": 512,
    "model.num_heads": 8,
    "model.num_kv_heads": 4,
    "model.head_width": 32,
    "model.mlp_width": 512,
    "learner.window_tokens": 256,
    "learner.max_windows": 64,
}


def small(**more: Any) -> RunConfig:
    return planned_config("llama3-8b", SMALL | {name.replace("__", "."): value for name, value in more.items()})


def bytes_of(tree: Any) -> int:
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("model", [{}, {"model__lora_rank": 4}, {"algorithm__advantage": "gae"}], ids=str)
def test_what_lies_there_between_steps_is_what_the_train_step_places(model: dict[str, Any]) -> None:
    config = small(**model)
    step = make_train_step(config, make_mesh(config.mesh, jax.devices()[:1]))
    state = step.abstract_state()
    needed = budget(config)
    assert needed.parameters == bytes_of(state.params)
    assert needed.optimizer == bytes_of(state.opt_state)
    assert needed.parameters < needed.gradients < 2 * needed.parameters


def test_a_parameter_is_divided_by_the_axes_that_split_it() -> None:
    config = small(mesh__fsdp=2, mesh__stage=2, mesh__tensor=4)
    sizes = {"fsdp": 2, "stage": 2, "tensor": 4, None: 1}
    step = make_train_step(small(), make_mesh(small().mesh, jax.devices()[:1]))
    expected = sum(
        leaf.size * 4 // math.prod(sizes[axis] for axis in axes_of(name))
        for name, leaf in named_leaves(step.abstract_state().params).items()
    )
    assert budget(config).parameters == expected


def test_more_of_an_axis_means_fewer_bytes_on_a_device() -> None:
    alone = budget(small())
    for axis in ("fsdp", "tensor", "stage"):
        split = budget(small(**{f"mesh__{axis}": 2}))
        assert split.parameters < 0.6 * alone.parameters
        assert split.optimizer < 0.6 * alone.optimizer
    assert budget(small(mesh__data=2)).parameters == alone.parameters


def test_activations_follow_remat_windows_and_schedule() -> None:
    def held(**options: Any) -> int:
        return budget(small(**options)).activations

    assert held(model__remat="none") > held() == held(model__remat="layer")
    assert held(learner__windows_per_microbatch=4) > 2 * held(learner__windows_per_microbatch=1)
    few, many = (
        {"mesh__stage": 4, "mesh__schedule": "gpipe", "learner__max_windows": windows} for windows in (128, 192)
    )
    stream = 256 * 256 * 2
    assert held(**many) - held(**few) == 64 * stream
    plain = {**many, "mesh__schedule": "1f1b"}
    assert held(**many) - held(**plain) == (192 - 7) * stream


def test_the_reference_lies_in_the_compute_type() -> None:
    whole = budget(small(model__compute_dtype="float32"))
    assert whole.reference == whole.parameters
    halved = budget(small())
    assert halved.reference < 0.51 * whole.reference
    assert whole.casts == 0
    embedding = 512 * 256 * 4
    assert halved.casts == pytest.approx((halved.parameters - embedding) / 2, rel=0.01)


def test_every_part_counts_in_the_total() -> None:
    needed = budget(small())
    assert needed.total == sum(dataclasses.asdict(needed).values())
    assert needed.largest == max(dataclasses.asdict(needed), key=lambda name: getattr(needed, name))

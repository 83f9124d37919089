"""The learner's step on meshes of all axes, compiled by the TPU compiler for eight chips that are only described."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planning.test_budget import small
from tunix_core.planning.chips import parse_topology
from tunix_core.planning.compiling import compile_for
from tunix_core.planning.gathers import weights_in_use
from tunix_core.planning.plan import StepPlan, make_plan

SHAPE: dict[str, Any] = {
    "model__num_layers": 12,
    "model__head_width": 128,
    "model__num_heads": 4,
    "model__num_kv_heads": 2,
    "model__model_width": 512,
    "model__mlp_width": 1536,
    "model__vocab_size": 4096,
    "learner__window_tokens": 2048,
    "learner__max_windows": 16,
}
"""Deep enough that layers stay a loop on every stage."""


def planned(**options: Any) -> StepPlan:
    config, topology = small(**SHAPE | options), parse_topology("v5e:2x4")
    return make_plan(config, topology, compile_for(config, topology))


MESHES = {
    "fsdp and tensor": {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2},
    "1f1b": {"mesh__fsdp": 2, "mesh__stage": 2, "mesh__tensor": 2},
    "gpipe, two updates": {
        "mesh__data": 2,
        "mesh__fsdp": 2,
        "mesh__stage": 2,
        "mesh__schedule": "gpipe",
        "learner__updates_per_batch": 2,
    },
    "adapters": {"mesh__fsdp": 2, "mesh__stage": 2, "mesh__tensor": 2, "model__lora_rank": 8},
}


@pytest.mark.tpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", MESHES.values(), ids=MESHES)
def test_the_step_compiles_on_every_axis_and_gathers_a_layer_at_a_time(options: dict[str, Any]) -> None:
    plan = planned(**options)
    compiled = plan.compiled
    assert compiled is not None
    assert plan.fits
    assert compiled.num_kernels >= 5, "our attention, forward and backward"

    # Between steps a device holds what was counted; arrays are padded to tiles.
    assert compiled.argument_bytes == pytest.approx(plan.budget.lasting, rel=0.05)

    axes = {axis for one in plan.collectives for axis in one.axes}
    assert axes == {axis for axis in ("data", "fsdp", "stage", "tensor") if getattr(plan.config.mesh, axis) > 1}
    kinds = {(one.kind, one.axes) for one in plan.collectives}
    assert ("all-gather", ("fsdp",)) in kinds
    if plan.config.mesh.tensor > 1:
        assert ("all-gather", ("tensor",)) in kinds
        assert {("all-reduce", ("tensor",)), ("reduce-scatter", ("tensor",))} & kinds
    if plan.config.mesh.stage > 1:
        assert ("collective-permute", ("stage",)) in kinds

    assert compiled.misplaced == ()
    gathered = {
        array.num_elements
        for one in compiled.collectives
        if (one.kind, one.axes) == ("all-gather", ("fsdp",))
        for array in one.results
    }
    assert gathered & set(weights_in_use(plan.config)), "the check looked at weights"

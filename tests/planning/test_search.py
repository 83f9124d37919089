"""Meshes that are proposed, and changes that are advised."""

from __future__ import annotations

import math
from typing import Any

from tests.planning.test_budget import small
from tunix_core.planning.budget import budget
from tunix_core.planning.chips import parse_topology
from tunix_core.planning.presets import planned_config
from tunix_core.planning.search import advice, described, factorisations, search
from tunix_core.planning.work import work


def llama(**mesh: int) -> Any:
    return planned_config(
        "llama3-70b", {"learner.window_tokens": 8192} | {f"mesh.{axis}": n for axis, n in mesh.items()}
    )


def test_factorisations_are_all_ordered_products() -> None:
    assert sorted(factorisations(4, 2)) == [(1, 4), (2, 2), (4, 1)]
    assert len(set(factorisations(64, 4))) == math.comb(6 + 3, 3)
    assert all(math.prod(one) == 12 for one in factorisations(12, 4))


def test_every_proposal_uses_all_devices_and_is_accepted() -> None:
    found = search(llama(), parse_topology("v5p:4x4x8"))
    for one in found:
        mesh = one.config.mesh
        assert mesh.data * mesh.fsdp * mesh.stage * mesh.tensor == 128
        assert 80 % mesh.stage == 0
        assert 8 % mesh.tensor == 0
    assert len({described(one.config.mesh) for one in found}) == len(found) > 20


def test_what_fits_comes_first_and_by_time() -> None:
    topology = parse_topology("v5p:4x4x8")
    found = search(llama(), topology)
    fitting = [one for one in found if one.fits]
    assert found[: len(fitting)] == fitting != []
    assert [one.seconds for one in fitting] == sorted(one.seconds for one in fitting)
    assert all(one.budget.total <= topology.chip.hbm_bytes for one in fitting)
    # Without an axis that splits them, a chip would hold 70 billion parameters.
    assert all(one.config.mesh.data < 128 for one in fitting)


def test_slices_are_joined_along_data() -> None:
    found = search(llama(), parse_topology("v5p:4x4x4", 2))
    assert {one.config.mesh.data % 2 for one in found} == {0}


def test_a_run_that_is_too_large_gets_changes_that_were_computed() -> None:
    topology = parse_topology("v5e:8x8")
    config = llama(fsdp=8, tensor=8)
    changes = advice(config, topology)
    assert [one.fits for one in changes] == sorted((one.fits for one in changes), reverse=True)
    texts = {one.text: one for one in changes}
    adapters = planned_config(
        "llama3-70b", {"learner.window_tokens": 8192, "mesh.fsdp": 8, "mesh.tensor": 8, "model.lora_rank": 16}
    )
    assert texts["model.lora_rank=16"].saved_bytes == budget(config).total - budget(adapters).total > 0
    assert texts["model.lora_rank=16"].fits
    assert not any("remat" in text for text in texts), "it is set already"
    assert any(text.startswith("--topology v5e:") and one.fits for text, one in texts.items())


def test_an_estimate_that_leaves_something_out_is_raised_by_the_compilers_figure() -> None:
    topology = parse_topology("v5e:8x8")
    config = llama(fsdp=8, tensor=8)
    by_estimate = [one.text for one in advice(config, topology) if one.fits]
    above = budget(config).total + 8 * topology.chip.hbm_bytes
    assert by_estimate
    assert not any(one.fits for one in advice(config, topology, above))


def test_remat_and_microbatches_are_advised_where_they_are_not_set() -> None:
    config = small(model__remat="none", learner__windows_per_microbatch=8, mesh__stage=2, mesh__schedule="gpipe")
    texts = [one.text for one in advice(config, parse_topology("v5e:1x2"))]
    assert {"model.remat=layer", "learner.windows_per_microbatch=1", "mesh.schedule=1f1b"} <= set(texts)


def test_the_bubble_is_that_of_the_schedule() -> None:
    done = work(small(mesh__stage=4, learner__max_windows=128))
    assert done.num_microbatches == 128
    assert done.bubble == 3 / (128 + 3)
    assert work(small()).bubble == 0
    # Each update fills and drains the pipeline by itself.
    assert work(small(mesh__stage=4, learner__max_windows=128, learner__updates_per_batch=4)).bubble == 3 / (32 + 3)


def test_work_counts_what_is_computed_again() -> None:
    plain, layer = work(small(model__remat="none")), work(small(model__remat="layer"))
    assert plain.model_flops == layer.model_flops < plain.executed_flops < layer.executed_flops
    piped = work(small(model__remat="layer", mesh__stage=2))
    assert piped.executed_flops > layer.executed_flops
    assert work(small(), segment_tokens=64).model_flops < work(small()).model_flops


def test_traffic_names_the_axes_that_exist() -> None:
    assert work(small()).sent_bytes == {}
    assert set(work(small(mesh__fsdp=2, mesh__stage=2, mesh__tensor=2)).sent_bytes) == {"fsdp", "stage", "tensor"}
    assert set(work(small(mesh__data=2)).sent_bytes) == {"data"}

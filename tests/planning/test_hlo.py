"""Collectives of a compiled program's text."""

from __future__ import annotations

import numpy as np
import pytest

from tunix_core.planning.hlo import Array, Total, axes_between, collectives, totals

MESH = {"data": 1, "fsdp": 2, "stage": 2, "tensor": 2}

TEXT = """\
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%layer (p: (s32[], bf16[512,128])) -> (s32[], bf16[512,128]) {
  %p = (s32[], bf16[512,128]) parameter(0)
  %gather = bf16[1024,128]{1,0:T(8,128)(2,1)S(1)} all-gather(%w), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, use_global_device_ids=true
  %scatter = bf16[256,128]{1,0} reduce-scatter(%x), channel_id=2, replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}, to_apply=%add
}

%below_ten (p: (s32[], bf16[512,128])) -> pred[] {
  %ten = s32[]{:T(128)} constant(10)
  %j = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %under = pred[]{:T(512)} compare(%j, %ten), direction=LT
}

%more (p: (s32[], bf16[512,128])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%started (w: bf16[256,64]) -> bf16[512,64] {
  ROOT %begun = bf16[512,64] all-gather(%w), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, frontend_attributes={chain_id="7"}
}

%awaited (w: bf16[256,64]) -> bf16[512,64] {
  ROOT %ended = bf16[512,64] all-gather(%w), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, frontend_attributes={chain_id="7"}
}

%microbatch (q: (s32[], f32[])) -> (s32[], f32[]) {
  %q = (s32[], f32[]) parameter(0)
  %layers = (s32[], bf16[512,128]) while(%t), condition=%below_ten, body=%layer
  %sent = (bf16[64,128]{1,0}, bf16[64,128]{1,0}, u32[], u32[]) collective-permute-start(%y), channel_id=3, source_target_pairs={{0,2},{2,0},{1,3},{3,1},{4,6},{6,4},{5,7},{7,5}}
  %arrived = bf16[64,128]{1,0} collective-permute-done(%sent)
  %any = f32[] conditional(%is_last, %y, %z), true_computation=%first_branch, false_computation=%second_branch
}

%first_branch (u: f32[]) -> f32[] {
  ROOT %all = f32[32]{0} all-reduce(%u), channel_id=4, replica_groups=[2,4]<=[8], to_apply=%add
}

%second_branch (v: f32[]) -> f32[] {
  ROOT %none = f32[] constant(0)
}

ENTRY %main (r: f32[]) -> f32[] {
  %loop = (s32[], f32[]) while(%s), condition=%more, body=%microbatch
  %both = ((f32[8], f32[4]), (f32[16], f32[8])) all-gather-start(%k, %l), channel_id=5, replica_groups=[4,2]<=[8], dimensions={0}
  %begin = bf16[512,64] fusion(%w), kind=kCustom, calls=%started
  %end = bf16[512,64] fusion(%begin), kind=kCustom, calls=%awaited
  ROOT %done = (f32[16], f32[8]) all-gather-done(%both)
}
"""


def test_collectives_have_axes_bytes_and_counts() -> None:
    found = {(one.kind, one.axes): one for one in collectives(TEXT, MESH) if one.results[0].shape != (512, 64)}
    assert set(found) == {
        ("all-gather", ("fsdp",)),
        ("reduce-scatter", ("tensor",)),
        ("collective-permute", ("stage",)),
        ("all-reduce", ("stage", "tensor")),
        ("all-gather", ("tensor",)),
    }
    gather = found["all-gather", ("fsdp",)]
    assert gather.results == (Array("bf16", (1024, 128)),)
    assert (gather.sent_bytes, gather.times, gather.repeats) == (1024 * 128 * 2 // 2, 10, "microbatch")
    scatter = found["reduce-scatter", ("tensor",)]
    assert (scatter.sent_bytes, scatter.times) == (256 * 128 * 2, 10)
    assert found["collective-permute", ("stage",)].sent_bytes == 64 * 128 * 2
    assert found["all-reduce", ("stage", "tensor")].sent_bytes == 2 * 3 * 32 * 4 // 4
    both = found["all-gather", ("tensor",)]
    assert (both.results, both.sent_bytes) == ((Array("f32", (16,)), Array("f32", (8,))), 24 * 4 // 2)
    assert (both.times, both.repeats) == (1, "step")


def test_a_collective_in_several_fusions_counts_once() -> None:
    found = [one for one in collectives(TEXT, MESH) if one.results == (Array("bf16", (512, 64)),)]
    assert [(one.axes, one.times, one.repeats) for one in found] == [(("fsdp",), 1, "step")]


def test_totals_multiply_by_the_microbatches() -> None:
    found = totals(collectives(TEXT, MESH), num_microbatches=3)
    assert found[0] == Total("all-gather", ("fsdp",), 31, 30 * 1024 * 128 + 512 * 64)
    assert Total("all-gather", ("tensor",), 1, 48) in found


UPDATES = """
%updates (q: (s32[], f32[])) -> (s32[], f32[]) {
  %again = (s32[], f32[]) while(%s), condition=%more, body=%microbatch
  %norm = f32[32]{0} all-reduce(%u), channel_id=6, replica_groups=[4,2]<=[8], to_apply=%add
}

%below_two (p: (s32[], f32[])) -> pred[] {
  %two = s32[] constant(2)
  %j = s32[] get-tuple-element(%p), index=0
  ROOT %under = pred[] compare(%j, %two), direction=LT
}

ENTRY %main (r: f32[]) -> f32[] {
  %all = (s32[], f32[]) while(%q), condition=%below_two, body=%updates
"""


def test_a_pass_before_the_updates_goes_over_all_microbatches() -> None:
    """Six micro-batches: the pass over six, each of two updates over three."""
    text = TEXT.replace("ENTRY %main (r: f32[]) -> f32[] {\n", UPDATES)
    found = collectives(text, MESH)
    assert [one.repeats for one in found if one.times == 10] == ["microbatch"] * 2
    assert [one.repeats for one in found if one.times == 20] == ["microbatch_of_update"] * 2
    once = totals(collectives(TEXT, MESH), num_microbatches=6)
    twice = {(one.kind, one.axes): one.times for one in totals(found, num_microbatches=6, num_updates=2)}
    assert twice["reduce-scatter", ("tensor",)] == 60 + 60
    assert twice["all-reduce", ("stage", "tensor")] == 6 + 6
    assert twice["all-reduce", ("tensor",)] == 2
    assert {(one.kind, one.axes): one.times for one in once}["reduce-scatter", ("tensor",)] == 60


@pytest.mark.parametrize(
    ("groups", "axes"),
    [([[0, 4], [1, 5]], ("fsdp",)), ([[0, 1, 2, 3]], ("stage", "tensor")), ([[0, 2], [2, 0]], ("stage",)), ([[0]], ())],
)
def test_groups_differ_along_axes(groups: list[list[int]], axes: tuple[str, ...]) -> None:
    assert axes_between(np.array(groups), MESH) == axes

"""Collectives in a compiled program's text: kind, mesh axes, bytes, and how often a step runs them.

A loop counts from 0 to a constant, or to a bound that is data (that over micro-batches): what is inside of the latter
says so, and runs once per micro-batch (a pipeline's draining fewer times): of an update where that loop lies in another one, that
over the updates, else of the whole batch. Every branch of a conditional counts, so a
stage that takes another one does less than is said here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import numpy as np

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")

_WIDTHS = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|bf16|f\d+\w*|[su]\d+)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_CONSTANT = re.compile(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_BELOW = re.compile(r"ROOT .* compare\(%?([\w.\-]+), %?([\w.\-]+)\), direction=LT")
_CHAIN = re.compile(r'chain_id="(\d+)"')
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


Repeats = Literal["step", "microbatch", "microbatch_of_update"]
"""Once per that."""


class Array(NamedTuple):
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * _width(self.dtype)


class Collective(NamedTuple):
    """One instruction, as each device runs it."""

    kind: str
    axes: tuple[str, ...]
    """Of the mesh, along which the devices of a group differ."""
    results: tuple[Array, ...]
    sent_bytes: int
    """What a device sends each time, in a ring."""
    times: int
    """Times per step, or per micro-batch; those of all updates, where it is in their loop."""
    repeats: Repeats


class Total(NamedTuple):
    """Of all collectives of a kind along the same axes."""

    kind: str
    axes: tuple[str, ...]
    times: int
    """In a step."""
    sent_bytes: int
    """By a device in a step."""


def _width(dtype: str) -> int:
    if dtype in _WIDTHS:
        return _WIDTHS[dtype]
    return max(1, int(re.sub(r"\D*(\d+).*", r"\1", dtype)) // 8)


class _Call(NamedTuple):
    callee: str
    condition: str
    """Of a loop, whose body the callee is."""
    is_fused: bool


class _Computation(NamedTuple):
    calls: list[_Call]
    collectives: list[str]
    """Lines."""
    bound: dict[str, int]
    """Of integer constants, and under "" of the loop that it is the condition of, where that is a constant."""


def _computations(lines: Iterable[str]) -> tuple[str, dict[str, _Computation]]:
    """The entry's name, and all computations by name."""
    found: dict[str, _Computation] = {}
    entry, current = "", _Computation([], [], {})
    for line in lines:
        if line and not line[0].isspace():
            if header := _HEADER.match(line):
                current = found.setdefault(header[2], _Computation([], [], {}))
                entry = header[2] if header[1] else entry
        elif _COLLECTIVE.search(line):
            current.collectives.append(line)
        elif constant := _CONSTANT.search(line):
            current.bound[constant[1]] = int(constant[2])
        elif below := _BELOW.search(line):
            if below[2] in current.bound:
                current.bound[""] = current.bound[below[2]]
        elif "=" in line:
            current.calls.extend(_calls(line))
    return entry, found


def _calls(line: str) -> Iterator[_Call]:
    loop = _CONDITION.search(line)
    for name in _CALLED.findall(line):
        yield _Call(name, loop[1] if loop else "", is_fused=" fusion(" in line)
    if branches := _BRANCHES.search(line):
        for name in branches[1].split(","):
            yield _Call(name.strip().lstrip("%"), "", is_fused=False)


def _groups(line: str) -> np.ndarray | None:
    """int `[groups, devices]`; None: one group of all."""
    if found := _LISTED.search(line):
        return np.array([[int(n) for n in part.split(",")] for part in re.findall(r"\{([\d,]+)\}", found[1])])
    if found := _IOTA.search(line):
        shape, dims = ([int(n) for n in text.split(",")] for text in (found[1], found[2]))
        numbers = np.arange(math.prod(dims)).reshape(dims)
        if found[3]:
            numbers = numbers.transpose([int(n) for n in found[3].split(",")])
        return numbers.reshape(shape)
    return None


def axes_between(groups: np.ndarray | None, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which devices of one group differ; devices are numbered in the mesh's order, the last axis fastest."""
    if groups is None:
        return tuple(axis for axis, size in mesh.items() if size > 1)
    places = np.stack(np.unravel_index(groups, tuple(mesh.values())))  # [axes, groups, devices]
    differ = (places != places[:, :, :1]).any(axis=(1, 2))
    return tuple(axis for axis, is_other in zip(mesh, differ, strict=True) if is_other)


def _collective(line: str, mesh: Mapping[str, int], count: int, repeats: Repeats) -> Collective:
    found = _COLLECTIVE.search(line)
    assert found is not None
    kind, is_start = found[2], bool(found[3])
    arrays = [Array(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in _ARRAY.findall(found[1])]
    if kind == "collective-permute":
        arrays = arrays[:1]
    elif is_start and kind != "all-reduce":  # operands, then results
        arrays = arrays[len(arrays) // 2 :]
    groups = _groups(line)
    size = groups.shape[1] if groups is not None else math.prod(mesh.values())
    share = {
        "all-gather": (size - 1) / size,
        "reduce-scatter": size - 1.0,  # of its result
        "all-reduce": 2 * (size - 1) / size,
        "all-to-all": (size - 1) / size,
        "collective-permute": 1.0,
    }[kind]
    sent = int(share * sum(array.num_bytes for array in arrays))
    return Collective(kind, axes_between(groups, mesh), tuple(arrays), sent, count, repeats)


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """Of a compiled module.

    Args:
        text: `executable.as_text()`.
        mesh: axis -> devices, in the order of the mesh.
    """
    entry, computations = _computations(text.splitlines())

    def walk(name: str, count: int, repeats: Repeats, chains: set[str]) -> Iterator[Collective]:
        if name not in computations:
            return
        for line in computations[name].collectives:
            # A collective behind other work stands in several fusions, from its start to its end.
            chain = _CHAIN.search(line)
            if chain is None or chain[1] not in chains:
                yield _collective(line, mesh, count, repeats)
            if chain is not None:
                chains.add(chain[1])
        for call in computations[name].calls:
            trips = computations[call.condition].bound.get("", 0) if call.condition in computations else 1
            inner = chains if call.is_fused else set()
            over_microbatches: Repeats = "microbatch_of_update" if count > 1 else "microbatch"
            inside = over_microbatches if trips == 0 and repeats == "step" else repeats
            yield from walk(call.callee, count * max(1, trips), inside, inner)

    return list(walk(entry, 1, "step", set()))


def totals(found: Iterable[Collective], num_microbatches: int, num_updates: int = 1) -> list[Total]:
    """By kind and axes, the heaviest first.

    Args:
        num_microbatches: of the batch.
        num_updates: that share them.
    """
    repeated = {"step": 1, "microbatch": num_microbatches, "microbatch_of_update": num_microbatches // num_updates}
    counts: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for one in found:
        times = one.times * repeated[one.repeats]
        before = counts.get((one.kind, one.axes), (0, 0))
        counts[one.kind, one.axes] = (before[0] + times, before[1] + times * one.sent_bytes)
    return sorted((Total(*key, *value) for key, value in counts.items()), key=lambda total: -total.sent_bytes)

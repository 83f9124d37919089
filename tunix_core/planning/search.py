"""Meshes for a run on a slice, the fitting ones first; and what else would make a run fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from tunix_core.config import RunConfig
from tunix_core.errors import ConfigError
from tunix_core.mesh_config import MeshConfig
from tunix_core.planning.budget import Budget, budget
from tunix_core.planning.chips import Topology
from tunix_core.planning.work import work

ESTIMATED_SHARE = 0.92
"""Of the memory: an estimate above it does not count as fitting."""

MAX_DOUBLINGS = 3
"""Of a slice that does not suffice, when a larger one is advised."""

HOST_CHIPS = 8
"""A tensor axis longer than this leaves a host's fast links, and is not proposed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A mesh, by estimates."""

    config: RunConfig
    budget: Budget
    fits: bool
    seconds: float
    bubble: float


def factorisations(number: int, num_parts: int) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write it as a product of so many positive integers."""
    if num_parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in factorisations(number // first, num_parts - 1):
                yield (first, *rest)


def candidate(config: RunConfig, topology: Topology, segment_tokens: int = 0) -> Candidate:
    needed, done = budget(config), work(config, segment_tokens)
    return Candidate(
        config=config,
        budget=needed,
        fits=needed.total <= ESTIMATED_SHARE * topology.chip.hbm_bytes,
        seconds=done.seconds(topology.chip, topology.num_devices),
        bubble=done.bubble,
    )


def search(config: RunConfig, topology: Topology, segment_tokens: int = 0) -> list[Candidate]:
    """All meshes that the run accepts: those that fit, by estimated time, then the others by bytes."""
    found = []
    for data, fsdp, stage, tensor in factorisations(topology.num_devices, 4):
        if tensor > HOST_CHIPS or data % topology.num_slices:
            continue
        mesh = MeshConfig(
            data=data, fsdp=fsdp, stage=stage, tensor=tensor, schedule=config.mesh.schedule if stage > 1 else "1f1b"
        )
        try:
            found.append(candidate(dataclasses.replace(config, mesh=mesh), topology, segment_tokens))
        except ConfigError:  # an axis that does not divide what it splits
            continue
    return sorted(found, key=lambda one: (not one.fits, one.seconds if one.fits else one.budget.total))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """What would lower a device's bytes, by estimates."""

    text: str
    saved_bytes: int
    fits: bool


Section = tuple[str, dict[str, Any]]


def _replaced(config: RunConfig, section: str, **fields: Any) -> RunConfig:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **fields)})


def _settings(config: RunConfig) -> Iterator[tuple[str, Callable[[], RunConfig]]]:
    """Changes of options that leave chips and mesh alone."""
    if config.model.remat != "layer":
        yield "model.remat=layer", lambda: _replaced(config, "model", remat="layer")
    if config.mesh.stage > 1 and config.mesh.schedule == "gpipe":
        yield "mesh.schedule=1f1b", lambda: _replaced(config, "mesh", schedule="1f1b")
    if config.learner.windows_per_microbatch > 1:
        yield (
            "learner.windows_per_microbatch=1",
            lambda: _replaced(config, "learner", windows_per_microbatch=1),
        )
    if config.model.compute_dtype != "bfloat16":
        yield "model.compute_dtype=bfloat16", lambda: _replaced(config, "model", compute_dtype="bfloat16")
    if config.optimizer.first_moment_dtype != "bfloat16":
        yield (
            "optimizer.first_moment_dtype=bfloat16",
            lambda: _replaced(config, "optimizer", first_moment_dtype="bfloat16"),
        )
    if not config.model.lora_rank:
        yield "model.lora_rank=16", lambda: _replaced(config, "model", lora_rank=16)
    half = config.learner.window_tokens // 2
    yield f"learner.window_tokens={half}", lambda: _replaced(config, "learner", window_tokens=half)


def _leanest(config: RunConfig, topology: Topology) -> Candidate | None:
    """The fastest mesh that fits, or else the one of fewest bytes."""
    found = search(config, topology)
    return found[0] if found else None


def described(mesh: MeshConfig) -> str:
    """`fsdp=4,tensor=8`, as `--mesh` takes it."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.sizes.items() if size > 1) or "data=1"


def advice(config: RunConfig, topology: Topology, needed_bytes: int = 0) -> list[Change]:
    """Single changes that lower the bytes: the ones that suffice first, then by what they save.

    Args:
        needed_bytes: by the compiler, in place of the estimate's total.
    """
    now = budget(config).total
    factor = max(1.0, needed_bytes / now)
    """By which the estimate is short."""

    def change(text: str, config: RunConfig, topology: Topology) -> Change | None:
        needed = budget(config).total
        fits = needed * factor <= ESTIMATED_SHARE * topology.chip.hbm_bytes
        return Change(text=text, saved_bytes=now - needed, fits=fits) if needed < now else None

    found = []
    for text, changed in _settings(config):
        try:
            found.append(change(text, changed(), topology))
        except ConfigError:  # the run refuses it for another reason
            continue
    if (other := _leanest(config, topology)) is not None:
        found.append(change(f"--mesh {described(other.config.mesh)}", other.config, topology))
    larger = topology
    for _ in range(MAX_DOUBLINGS):
        larger = larger.doubled()
        if (other := _leanest(config, larger)) is not None and other.fits:
            text = f"--topology {larger.name} --mesh {described(other.config.mesh)}"
            found.append(change(text, other.config, larger))
            break
    return sorted((one for one in found if one), key=lambda one: (not one.fits, -one.saved_bytes))

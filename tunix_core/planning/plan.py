"""A plan: what a run's step takes of a slice, put together, as JSON and as text."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix_core.config import RunConfig
from tunix_core.config_loading import config_to_dict
from tunix_core.planning.budget import Budget, budget, num_windows
from tunix_core.planning.chips import GIB, Topology
from tunix_core.planning.compiling import Compiled
from tunix_core.planning.hlo import Total, totals
from tunix_core.planning.search import Candidate, Change, advice, described
from tunix_core.planning.work import Work, work


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Of one run on one slice."""

    config: RunConfig
    topology: Topology
    budget: Budget
    work: Work
    compiled: Compiled | None
    changes: tuple[Change, ...]

    @property
    def peak_bytes(self) -> int:
        """Of a device: by the compiler, or else the estimate."""
        return self.compiled.peak_bytes if self.compiled else self.budget.total

    @property
    def limit_bytes(self) -> int:
        if self.compiled and self.compiled.refused:
            return self.compiled.limit_bytes
        return self.topology.chip.hbm_bytes

    @property
    def fits(self) -> bool:
        """An executable is the compiler's word that it does."""
        return not self.compiled.refused if self.compiled else self.peak_bytes <= self.limit_bytes

    @property
    def collectives(self) -> list[Total]:
        if self.compiled is None:
            return []
        return totals(self.compiled.collectives, self.work.num_microbatches, self.config.learner.updates_per_batch)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        compiled = dataclasses.asdict(self.compiled) if self.compiled else None
        if compiled:
            compiled["collectives"] = [one._asdict() for one in self.collectives]
        return {
            "topology": self.topology.name,
            "num_slices": self.topology.num_slices,
            "num_chips": self.topology.num_chips,
            "num_devices": self.topology.num_devices,
            "mesh": described(self.config.mesh),
            "num_windows": num_windows(self.config),
            "hbm_bytes": self.topology.chip.hbm_bytes,
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
            "estimate": {**dataclasses.asdict(self.budget), "total": self.budget.total},
            "work": dataclasses.asdict(self.work),
            "compiled": compiled,
            "changes": [dataclasses.asdict(change) for change in self.changes],
            "config": config_to_dict(self.config),
        }


def make_plan(
    config: RunConfig, topology: Topology, compiled: Compiled | None = None, segment_tokens: int = 0
) -> StepPlan:
    """Args: compiled: None plans by estimates alone."""
    plan = StepPlan(
        config=config,
        topology=topology,
        budget=budget(config),
        work=work(config, segment_tokens),
        compiled=compiled,
        changes=(),
    )
    if plan.fits:
        return plan
    return dataclasses.replace(plan, changes=tuple(advice(config, topology, plan.peak_bytes)))


def _gib(amount: float) -> str:
    return f"{amount / GIB:9.2f} GiB"


def as_text(plan: StepPlan) -> str:
    """For a person."""
    config, topology, compiled, done = plan.config, plan.topology, plan.compiled, plan.work
    model = config.model
    lines = [
        f"{topology.num_slices} x {topology.name}, {topology.num_chips} chips, mesh {described(config.mesh)}",
        f"window {config.learner.window_tokens} tokens, {num_windows(config)} windows in a batch, "
        f"{done.num_microbatches} micro-batches of {config.learner.windows_per_microbatch} on each data shard",
        f"remat {model.remat}, {model.compute_dtype}, "
        + (f"adapters of rank {model.lora_rank}" if model.lora_rank else "all weights trained")
        + (f", {config.mesh.schedule}" if config.mesh.stage > 1 else ""),
        "",
        f"bytes per device ({_gib(topology.chip.hbm_bytes).strip()} of HBM)",
    ]
    for name, amount in dataclasses.asdict(plan.budget).items():
        mark = "" if name in ("parameters", "optimizer", "reference", "batch") else "  (estimate)"
        lines.append(f"  {name:12}{_gib(amount)}{mark}")
    lines.append(f"  {'total':12}{_gib(plan.budget.total)}  (estimate)")
    if compiled and compiled.temporary_bytes:
        lines.append(f"  {'temporaries':12}{_gib(compiled.temporary_bytes)}  (compiler: gradients and activations)")
    if compiled:
        lines.append(f"  {'peak':12}{_gib(plan.peak_bytes)}  (compiler)")
    lines += ["", *_work_lines(plan)]
    if compiled:
        lines += [
            "",
            f"compiled in {compiled.wall_seconds:.0f} s ({compiled.cpu_seconds:.0f} CPU-s), host memory "
            f"{_gib(compiled.host_bytes).strip()}, {compiled.num_kernels} kernels",
        ]
        lines += [f"gathers what it should not: {text}" for text in compiled.misplaced]
    verdict = "fits" if plan.fits else "does NOT fit"
    lines += ["", f"{verdict}: {_gib(plan.peak_bytes).strip()} of {_gib(plan.limit_bytes).strip()}"]
    if not plan.fits:
        lines.append(f"largest part: {plan.budget.largest}. Single changes, by estimates:")
        lines += [
            f"  {change.text:60} saves {_gib(change.saved_bytes).strip():>11}{', then fits' if change.fits else ''}"
            for change in plan.changes
        ] or ["  none of those known lowers the bytes"]
    return "\n".join(lines)


def _work_lines(plan: StepPlan) -> list[str]:
    done, topology = plan.work, plan.topology
    lines = [
        f"FLOPs per step: model {done.model_flops:.3g}, reference {done.reference_flops:.3g}, executed "
        f"{done.executed_flops:.3g}",
        f"pipeline bubble: {done.bubble:.1%}",
    ]
    found = plan.collectives
    if found:
        lines.append(
            "collectives of a device per step, by the compiled program; all branches, and every loop that is bound by data, a "
            "pipeline's draining too, once per micro-batch"
        )
        lines += [
            f"  {one.kind:20}{'+'.join(one.axes) or '-':14}{one.times:8} times{one.sent_bytes / 1e9:12.2f} GB sent"
            for one in found
        ]
    else:
        lines.append("traffic of a device per step, by estimate")
        lines += [f"  {axis:20}{amount / 1e9:12.2f} GB sent" for axis, amount in done.sent_bytes.items()]
    seconds = done.seconds(topology.chip, topology.num_devices)
    lines.append(f"at peak rates and with nothing overlapped: {seconds:.2f} s (orders meshes; no forecast)")
    return lines


def search_text(found: list[Candidate], limit: int) -> str:
    """The first candidates, a line each."""
    lines = [f"{'mesh':40}{'bytes':>14}{'bubble':>9}{'seconds':>9}  by estimates"]
    for one in found[:limit]:
        fits = "fits" if one.fits else "does not fit"
        lines.append(
            f"{described(one.config.mesh):40}{_gib(one.budget.total):>14}{one.bubble:9.1%}{one.seconds:9.2f}  {fits}"
        )
    return "\n".join(lines)

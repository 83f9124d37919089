"""Llama-3-70B at windows of 8,192 tokens on slices that are only described: `python -m tests.planning.big_plans [--json FILE]`.

Each case is compiled by libtpu, the learner's own step with all weights trained, and nothing is executed. Exits non-zero
where a case does not end as it should. Minutes; `make tpu-plans` runs it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

from tunix_core.planning.chips import GIB, parse_topology
from tunix_core.planning.compiling import compile_for
from tunix_core.planning.plan import StepPlan, as_text, make_plan
from tunix_core.planning.presets import parse_mesh, planned_config


class Case(NamedTuple):
    topology: str
    mesh: str
    fits: bool


CASES = {
    "v5p-128": Case("v5p:4x4x8", "fsdp=4,stage=4,tensor=8", True),
    "v5p-64": Case("v5p:4x4x4", "fsdp=8,tensor=8", True),
    "v6e-64": Case("v6e:8x8", "fsdp=8,tensor=8", True),
    "v5e-64": Case("v5e:8x8", "fsdp=8,tensor=8", False),
}

HEADER = (
    "| slice | mesh | estimate | peak per chip | of | model FLOPs per step | bubble | compile | CPU | host memory |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


def planned(case: Case) -> StepPlan:
    overrides = {"learner.window_tokens": 8192} | {f"mesh.{axis}": n for axis, n in parse_mesh(case.mesh).items()}
    config, topology = planned_config("llama3-70b", overrides), parse_topology(case.topology)
    return make_plan(config, topology, compile_for(config, topology))


def row(name: str, case: Case, plan: StepPlan) -> str:
    compiled = plan.compiled
    assert compiled is not None
    peak = f"{plan.peak_bytes / GIB:.1f} GiB" + (", refused" if compiled.refused else "")
    cells = [
        name,
        case.mesh + (f", {plan.config.mesh.schedule}" if plan.config.mesh.stage > 1 else ""),
        f"{plan.budget.total / GIB:.1f} GiB",
        peak,
        f"{plan.limit_bytes / GIB:.2f} GiB",
        f"{plan.work.model_flops:.2g}",
        f"{plan.work.bubble:.0%}",
        f"{compiled.wall_seconds:.0f} s",
        f"{compiled.cpu_seconds:.0f} s",
        f"{compiled.host_bytes / GIB:.1f} GiB",
    ]
    return f"| {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=CASES, action="append", help="these cases (default: all)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    rows, written, wrong = [], {}, []
    for name in arguments.only or CASES:
        case = CASES[name]
        plan = planned(case)
        print(f"{as_text(plan)}\n", flush=True)
        rows.append(row(name, case, plan))
        written[name] = plan.to_dict()
        if plan.fits != case.fits:
            wrong.append(f"{name}: fits is {plan.fits}, should be {case.fits}")
        if plan.compiled is not None:
            wrong += [f"{name}: {line}" for line in plan.compiled.misplaced]
    print("\n".join([*HEADER, *rows, *wrong]))
    if arguments.json:
        arguments.json.write_text(json.dumps(written, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

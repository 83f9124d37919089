"""Plans a run on a described TPU slice, no chip needed: `python -m tasks.plan --model llama3-70b --topology v5p:4x4x8 …`.

Compiles the learner's own step with libtpu in a child process. Exit code 3: it does not fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from tunix_core.config_loading import parse_overrides
from tunix_core.errors import ConfigError, TunixError, report_error
from tunix_core.validation import require_range

EXIT_DOES_NOT_FIT = 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tunixctl plan", description=__doc__)
    parser.add_argument("--model", required=True, help="a known model, a folder with a config.json, or a recipe")
    parser.add_argument("--topology", required=True, help="such as v5p:4x4x8, v5e:2x4")
    parser.add_argument("--slices", type=int, default=1, help="slices of that shape, joined along data (%(default)s)")
    parser.add_argument("--mesh", help="such as fsdp=4,stage=4,tensor=8; default: the best that --search finds")
    parser.add_argument("--window", type=int, help="learner.window_tokens")
    parser.add_argument("--windows", type=int, help="learner.max_windows, of a batch")
    parser.add_argument(
        "--segment", type=int, default=0, help="tokens of a trajectory, for FLOPs (default: its window)"
    )
    parser.add_argument("--set", dest="overrides", action="append", default=[], help="section.field=value")
    parser.add_argument("--search", action="store_true", help="list meshes for the slice, those that fit first")
    parser.add_argument("--limit", type=int, default=10, help="meshes that --search lists (%(default)s)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="estimates only, in a second")
    parser.add_argument("--hlo", type=Path, help="write the compiled program here")
    parser.add_argument("--json", type=Path, help="also write it here")
    return parser


def _overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {"learner.window_tokens": arguments.window, "learner.max_windows": arguments.windows}
    return {name: value for name, value in given.items() if value is not None} | parse_overrides(arguments.overrides)


def plan(arguments: argparse.Namespace) -> int:
    """Raises TunixError."""
    # libtpu is for the child alone; this process only counts.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from tunix_core.planning.chips import parse_topology
    from tunix_core.planning.compiling import compile_for
    from tunix_core.planning.plan import as_text, make_plan, search_text
    from tunix_core.planning.presets import parse_mesh, planned_config
    from tunix_core.planning.search import described, search

    require_range("--segment", arguments.segment, 0)
    require_range("--limit", arguments.limit, 1)
    topology = parse_topology(arguments.topology, arguments.slices)
    overrides = _overrides(arguments)
    written: dict[str, Any] = {}
    if arguments.mesh is not None:
        sizes = parse_mesh(arguments.mesh)
        config = planned_config(arguments.model, overrides | {f"mesh.{axis}": n for axis, n in sizes.items()})
    else:
        config = planned_config(arguments.model, overrides)
    found = search(config, topology, arguments.segment) if arguments.search or arguments.mesh is None else []
    if arguments.mesh is None:
        if not found:
            raise ConfigError(
                "--topology", topology.name, "a slice whose devices some mesh of this model divides", "Choose another."
            )
        config = found[0].config
    if arguments.search:
        print(search_text(found, arguments.limit), end="\n\n")
        written["search"] = [
            {
                "mesh": described(one.config.mesh),
                "fits": one.fits,
                "seconds": one.seconds,
                "bubble": one.bubble,
                "estimate": {**dataclasses.asdict(one.budget), "total": one.budget.total},
            }
            for one in found
        ]
    _require_all_devices(config.mesh, topology)
    compiled = compile_for(config, topology, arguments.hlo) if arguments.compile else None
    made = make_plan(config, topology, compiled, arguments.segment)
    print(as_text(made))
    if arguments.json:
        arguments.json.write_text(json.dumps({"model": arguments.model, **made.to_dict(), **written}, indent=1) + "\n")
    return 0 if made.fits else EXIT_DOES_NOT_FIT


def _require_all_devices(mesh: Any, topology: Any) -> None:
    size = mesh.num_devices
    if size != topology.num_devices:
        raise ConfigError(
            "--mesh",
            size,
            f"axes whose product is the {topology.num_devices} devices of {topology.num_slices} x {topology.name}",
            "Leave --mesh out, or say --search, to have some proposed.",
        )


def main(argv: list[str] | None = None) -> int:
    try:
        return plan(_parser().parse_args(argv))
    except TunixError as error:
        return report_error(error)


if __name__ == "__main__":
    sys.exit(main())

"""The learner's step: memory, packing, utilisation, and train tokens/s against google-tunix and plain PyTorch.

    python -m tests.benchmarks.learner [--part NAME …] [--quick] [--json FILE] [--check]

Everything is measured in this run, on as many CPUs as the process may use; pin it with `taskset` for
fewer. `make bench-peers` builds the environment of the peers; without it our own rate is measured alone,
and `--check` fails. `--quick` takes smaller batches and leaves out the 34 M model, and the small one against its peers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks import logprob_memory, packing_gain, train_rate, utilisation
from tests.benchmarks.figures import Goal, shortfalls
from tests.benchmarks.machine import describe, print_description
from tunix_core.distributed.compilation import enable_compilation_cache

EXIT_GOAL_MISSED = 3


class Part(NamedTuple):
    measure: Callable[..., tuple[dict[str, Any], list[Goal]]]
    """(quick=…) -> figures, and the goals that they are held to."""
    report: Callable[[dict[str, Any]], None]


PARTS = {
    "memory": Part(logprob_memory.measure, logprob_memory.report),
    "packing": Part(packing_gain.measure, packing_gain.report),
    "utilisation": Part(utilisation.measure, utilisation.report),
    "rates": Part(train_rate.measure, train_rate.report),
}


def print_goals(goals: Sequence[Goal]) -> None:
    print("\nGoals")
    for goal in goals:
        print(f"  {'met   ' if goal.met else 'MISSED'}  {goal}")


def main(argv: list[str] | None = None, parts: Mapping[str, Part] = PARTS) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.learner")
    parser.add_argument("--part", action="append", choices=list(parts), help="only this one; may be repeated")
    parser.add_argument("--quick", action="store_true", help="smaller batches, fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--check", action="store_true", help="fail where a goal is missed or was not measured")
    arguments = parser.parse_args(argv)
    enable_compilation_cache()
    print_description()
    figures: dict[str, Any] = {}
    goals: list[Goal] = []
    for name in arguments.part or parts:
        started = time.monotonic()
        figures[name], held_to = parts[name].measure(quick=arguments.quick)
        figures[name]["wall_seconds"] = time.monotonic() - started
        parts[name].report(figures[name])
        goals += held_to
    print_goals(goals)
    if arguments.json:
        kept = {"machine": describe(), "quick": arguments.quick, "figures": figures}
        arguments.json.write_text(json.dumps({**kept, "goals": [goal._asdict() for goal in goals]}, indent=1))
    if arguments.check and (missed := shortfalls(goals)):
        print("\n".join(missed), file=sys.stderr)
        return EXIT_GOAL_MISSED
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A benchmark of several parts: its arguments, what it prints and keeps, and how it fails."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.figures import Goal, shortfalls
from tests.benchmarks.machine import describe, print_description
from tunix_core.distributed.compilation import enable_compilation_cache

EXIT_GOAL_MISSED = 3


class Part(NamedTuple):
    measure: Callable[..., tuple[dict[str, Any], list[Goal]]]
    """(quick=…) -> figures, and the goals that they are held to."""
    report: Callable[[dict[str, Any]], None]


def print_goals(goals: Sequence[Goal]) -> None:
    print("\nGoals")
    for goal in goals:
        print(f"  {'met   ' if goal.met else 'MISSED'}  {goal}")


def run_parts(name: str, parts: Mapping[str, Part], argv: list[str] | None) -> int:
    """The module `name` as a program: measure the parts that `argv` asks for; the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.benchmarks.{name}")
    parser.add_argument("--part", action="append", choices=list(parts), help="only this one; may be repeated")
    parser.add_argument("--quick", action="store_true", help="smaller batches, fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--check", action="store_true", help="fail where a goal is missed or was not measured")
    arguments = parser.parse_args(argv)
    enable_compilation_cache()
    print_description()
    figures: dict[str, Any] = {}
    goals: list[Goal] = []
    for part in arguments.part or parts:
        started = time.monotonic()
        figures[part], held_to = parts[part].measure(quick=arguments.quick)
        figures[part]["wall_seconds"] = time.monotonic() - started
        parts[part].report(figures[part])
        goals += held_to
    print_goals(goals)
    if arguments.json:
        kept = {"machine": describe(), "quick": arguments.quick, "figures": figures}
        arguments.json.write_text(json.dumps({**kept, "goals": [goal._asdict() for goal in goals]}, indent=1))
    if arguments.check and (missed := shortfalls(goals)):
        print("\n".join(missed), file=sys.stderr)
        return EXIT_GOAL_MISSED
    return 0

"""The actor's engine: kept tokens/s against google-tunix and Hugging Face, its distance to the machine's bound, slow tools.

    python -m tests.benchmarks.actor [--part NAME …] [--quick] [--json FILE] [--check]

Everything is measured in this run, on as many CPUs as the process may use; pin it with `taskset` for
fewer. `make bench-peers` builds the environment of the peers; without it our own rate is measured alone,
and `--check` fails. `--quick` takes the small model at one batch size, and one round.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from tests.benchmarks import generation_bound, generation_rate, tool_rollouts
from tests.benchmarks.parts import Part, run_parts

PARTS = {
    "rates": Part(generation_rate.measure, generation_rate.report),
    "bound": Part(generation_bound.measure, generation_bound.report),
    "tools": Part(tool_rollouts.measure, tool_rollouts.report),
}


def main(argv: list[str] | None = None, parts: Mapping[str, Part] = PARTS) -> int:
    return run_parts("actor", parts, argv)


if __name__ == "__main__":
    sys.exit(main())

"""The learner's step: memory, packing, utilisation, and train tokens/s against google-tunix and plain PyTorch.

    python -m tests.benchmarks.learner [--part NAME …] [--quick] [--json FILE] [--check]

Everything is measured in this run, on as many CPUs as the process may use; pin it with `taskset` for
fewer. `make bench-peers` builds the environment of the peers; without it our own rate is measured alone,
and `--check` fails. `--quick` takes smaller batches and leaves out the 34 M model, and the small one against its peers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from tests.benchmarks import logprob_memory, packing_gain, train_rate, utilisation
from tests.benchmarks.parts import Part, run_parts

PARTS = {
    "memory": Part(logprob_memory.measure, logprob_memory.report),
    "packing": Part(packing_gain.measure, packing_gain.report),
    "utilisation": Part(utilisation.measure, utilisation.report),
    "rates": Part(train_rate.measure, train_rate.report),
}


def main(argv: list[str] | None = None, parts: Mapping[str, Part] = PARTS) -> int:
    return run_parts("learner", parts, argv)


if __name__ == "__main__":
    sys.exit(main())

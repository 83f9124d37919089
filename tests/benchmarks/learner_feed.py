"""How much of the learner's possible rate a run reached: its own tokens/s over those from a full buffer.

    python -m tests.benchmarks.learner_feed --run URI [--cpus 1] [--quick] [--json FILE] [--check]

The baseline is the same packing, transfer and compiled step over batches that the run consumed, from
memory, on as many CPUs as the learner had, with nothing else running: measure after the run, on an
otherwise idle machine. What the run lacks to it, it spent waiting for data or sharing its CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.machine import describe, print_description
from tunix_core.config import RunConfig
from tunix_core.errors import ConfigError, DataError, TunixError
from tunix_core.storage.metrics_files import read_metrics
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.run_directory import read_run
from tunix_core.storage.store import ObjectStore, open_store

SECONDS = 45.0
QUICK_SECONDS = 15.0
MIN_CPU_SHARE = 0.9
"""Of one CPU: with less, others used the machine, and the baseline is too low to judge by."""
EXIT_GOAL_MISSED = 3


def pin(config: RunConfig, num_cpus: int | None) -> None:
    """To the run's learner CPUs, or to the last `num_cpus` of this process's; before JAX counts them.

    Raises:
        ConfigError: more CPUs than there are.
    """
    own = sorted(os.sched_getaffinity(0))
    if num_cpus is None:
        chosen = set(config.launcher.learner_cpus) & set(own) or set(own)
    else:
        if not 1 <= num_cpus <= len(own):
            raise ConfigError("--cpus", num_cpus, f"1 to {len(own)}", "This process may use no more.")
        chosen = set(own[-num_cpus:])
    os.sched_setaffinity(0, chosen)


def run_rate(store: ObjectStore) -> float:
    """The run's own tokens/s: its mean once warm, waits included.

    Raises:
        DataError: its learner has recorded none.
    """
    rates = read_metrics(store, "learner").get("tokens_per_second", np.zeros(0)).astype(np.float64)
    rates = rates[np.isfinite(rates)]
    if not len(rates):
        raise DataError("metrics of learner: no tokens_per_second. Measure a run that has trained.")
    return float(rates[-1])


def measure(store: ObjectStore, config: RunConfig, extra: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """Figures of the run and of the baseline."""
    from tunix_core.distributed.compilation import enable_compilation_cache
    from tunix_core.learner import full_buffer
    from tunix_core.learner.weights import load_reference

    own = run_rate(store)
    enable_compilation_cache()
    policies = PolicyStore(store)
    tensors, _ = policies.load(policies.versions()[-1])
    reference = load_reference(store, config, extra)
    full = full_buffer.measure(store, config, tensors, reference, seconds=seconds, num_rounds=5)
    return {
        "run_tokens_per_second": own,
        "full_buffer_tokens_per_second": full.tokens_per_second,
        "full_buffer_lowest": full.lowest,
        "full_buffer_highest": full.highest,
        "num_steps": full.num_steps,
        "seconds": full.seconds,
        "cpu_share": full.cpu_seconds / full.seconds,
        "ratio": own / full.tokens_per_second,
        "goal": config.goals.feed_ratio,
    }


def report(figures: dict[str, float]) -> None:
    print_description()
    print(f"\n{'':16}{'tokens/s':>10}{'lowest':>10}{'highest':>10}{'ratio':>8}")
    print(f"{'full buffer':16}" + "".join(f"{figures[k]:>10.0f}" for k in _FULL) + f"{1:>8.2f}")
    print(f"{'run':16}{figures['run_tokens_per_second']:>10.0f}{'':20}{figures['ratio']:>8.2f}")
    print(
        f"\n{figures['num_steps']:.0f} steps in {figures['seconds']:.1f} s after warm-up, median of 5 rounds; "
        f"the baseline had {figures['cpu_share']:.2f} of a CPU"
    )


def judge(figures: dict[str, float]) -> str:
    """What falls short; empty when the goal holds."""
    if figures["cpu_share"] < MIN_CPU_SHARE:
        return f"baseline spoiled: it had {figures['cpu_share']:.2f} of a CPU, at least {MIN_CPU_SHARE:g}. Measure again on an idle machine"
    if figures["ratio"] < figures["goal"]:
        return f"goal missed: ratio {figures['ratio']:.2f}, at least {figures['goal']:g}"
    return ""


_FULL = ("full_buffer_tokens_per_second", "full_buffer_lowest", "full_buffer_highest")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.learner_feed")
    parser.add_argument("--run", required=True, help="URI of a run that has trained")
    parser.add_argument("--cpus", type=int, help="pin to so many CPUs (the run's learner CPUs)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SECONDS:g} s instead of {SECONDS:g} s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--check", action="store_true", help="fail below the recipe's goals.feed_ratio")
    arguments = parser.parse_args(argv)
    try:
        store = open_store(arguments.run)
        config, extra = read_run(store)
        pin(config, arguments.cpus)
        figures = measure(store, config, extra, QUICK_SECONDS if arguments.quick else SECONDS)
    except TunixError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    report(figures)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": describe(), "figures": figures}, indent=1))
    if arguments.check and (shortfall := judge(figures)):
        print(shortfall, file=sys.stderr)
        return EXIT_GOAL_MISSED
    return 0


if __name__ == "__main__":
    sys.exit(main())

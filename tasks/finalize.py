"""Closes a run: held-out evaluation of its first and last version, summary and report.

    python -m tasks.finalize --run URI

Writes `reports/summary.json` and `reports/report.html`. Done again, it evaluates nothing twice.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from tasks.entry import Task, run_task
from tasks.evaluate import evaluate_held_out
from tunix_core import paths
from tunix_core.console.report import render
from tunix_core.errors import DataError
from tunix_core.evaluation.audit import audit_run
from tunix_core.evaluation.summary import actor_processes, build_summary, goals
from tunix_core.storage.control import write_heartbeat
from tunix_core.storage.metrics_files import read_metrics
from tunix_core.storage.policies import PolicyStore

FULL_BUFFER_SECONDS = 15.0


def _full_buffer_rate(task: Task, version: int) -> float | None:
    """Measured where the learner ran: on its CPUs. None where its mesh reaches over several hosts."""
    from tunix_core.distributed.compilation import enable_compilation_cache
    from tunix_core.distributed.mesh import has_mesh
    from tunix_core.learner.full_buffer import measure
    from tunix_core.learner.weights import load_reference

    if not has_mesh(task.config.mesh):
        task.log("full buffer: not measured, since the learner's mesh reaches over several hosts")
        return None
    enable_compilation_cache()
    tensors, _ = PolicyStore(task.store).open(version)
    reference = load_reference(task.store, task.config, task.extra)
    rate = measure(task.store, task.config, tensors, reference, seconds=task.arguments.full_buffer_seconds)
    task.log(
        f"full buffer: {rate.tokens_per_second:.0f} tokens/s ({rate.lowest:.0f} to {rate.highest:.0f}) "
        f"over {rate.num_steps} steps, {rate.seconds:.1f} s"
    )
    return rate.tokens_per_second


def _finalize(task: Task) -> None:
    versions = PolicyStore(task.store).versions()
    if not versions:
        raise DataError("policies: received none, accepted at least version 0. The warm start did not finish.")
    cpus = set(task.config.launcher.learner_cpus) & os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)  # before JAX counts the CPUs
    # First what a run is for: were this process killed while it measures, the evaluations are there.
    before, after = (evaluate_held_out(task, version) for version in (versions[0], versions[-1]))
    task.log(f"held-out success {before.success.value:.3f} -> {after.success.value:.3f}")
    rate = _full_buffer_rate(task, versions[-1])
    staleness = task.config.staleness
    audit = audit_run(task.store, max_staleness=staleness.max_staleness, max_reuse=staleness.max_reuse)
    summary = build_summary(
        task.store,
        task.config,
        task.extra,
        audit,
        before=before,
        after=after,
        full_buffer_tokens_per_second=rate,
    )
    actors = {name: read_metrics(task.store, name) for name in actor_processes(task.store)}
    page = render(summary, task.config, read_metrics(task.store, "learner"), audit, before, after, actors)
    task.store.put(paths.REPORTS + "summary.json", json.dumps(summary, indent=1).encode())
    task.store.put(paths.REPORTS + "report.html", page.encode())
    for text, met in goals(summary):
        task.log(f"{'met   ' if met else 'MISSED'} {text}")
    write_heartbeat(
        task.store,
        task.process,
        {
            "version": after.policy_version,
            "success_before": before.success.value,
            "success_after": after.success.value,
        },
    )


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--full-buffer-seconds",
        type=float,
        default=FULL_BUFFER_SECONDS,
        help="how long the learner's rate from a full buffer is measured (%(default)s)",
    )


def main(argv: list[str] | None = None) -> int:
    return run_task("finalize", _finalize, argv, configure=_configure)


if __name__ == "__main__":
    sys.exit(main())

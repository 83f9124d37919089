"""The figures that a run is judged by: `summary.json`, and whether it reached its goals.

Staleness, repetitions and versions come from the audit of the immutable objects; the ledger from the
learner, checked against the audit; rates from the metrics.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunix_core.config import RunConfig
from tunix_core.evaluation.audit import RunAudit, ledger_faults
from tunix_core.evaluation.held_out import HeldOutEvaluation
from tunix_core.storage.control import read_heartbeats
from tunix_core.storage.metrics_files import read_metrics
from tunix_core.storage.store import ObjectStore
from tunix_core.types import LEDGER_CLASSES


def _last(metrics: Mapping[str, np.ndarray], name: str) -> float:
    values = metrics.get(name, np.zeros(0))
    values = values[np.isfinite(values.astype(np.float64))] if len(values) else values
    return float(values[-1]) if len(values) else float("nan")


def _largest(metrics: Mapping[str, np.ndarray], name: str) -> int:
    """Over all lives of a process; 0 for one that ended before its first row."""
    values = metrics.get(name, np.zeros(0)).astype(np.float64)
    return int(np.nanmax(values)) if np.isfinite(values).any() else 0


def actor_processes(store: ObjectStore) -> list[str]:
    """Names of the actor processes that have shown a sign of life."""
    return sorted(name for name in read_heartbeats(store) if name.startswith("actor"))


def build_summary(
    store: ObjectStore,
    config: RunConfig,
    extra: Mapping[str, Any],
    audit: RunAudit,
    *,
    before: HeldOutEvaluation,
    after: HeldOutEvaluation,
    full_buffer_tokens_per_second: float | None,
) -> dict[str, Any]:
    """Everything in `summary.json`; plain JSON values.

    Args:
        full_buffer_tokens_per_second: None where it could not be measured; then it is no goal.
    """
    learner = read_metrics(store, "learner")
    actors = actor_processes(store)
    ledger = {name: int(_last(learner, f"ledger_{name}")) for name in ("read", *LEDGER_CLASSES)}
    compilations = [int(_last(learner, "compilations_after_warmup"))]
    compilations += [_largest(read_metrics(store, actor), "compilations_after_warmup") for actor in actors]
    rate = _last(learner, "tokens_per_second")
    return {
        "recipe": config.recipe,
        "seed": config.seed,
        "policy_version_before": before.policy_version,
        "policy_version_after": after.policy_version,
        "success_before": before.success.to_dict(),
        "success_after": after.success.to_dict(),
        "wall_seconds": round(time.time() - float(extra["created_at"]), 1),
        "num_steps": len(audit.steps),
        "num_actor_processes": len(actors),
        "num_policy_versions": len(audit.policy_versions),
        "max_staleness": config.staleness.max_staleness,
        "max_staleness_seen": audit.max_staleness_seen,
        "mean_staleness": mean_staleness(audit),
        "staleness_violations": audit.staleness_violations,
        "consumed_twice": len(audit.consumed_twice),
        "ledger": ledger,
        "ledger_faults": ledger_faults(ledger, audit),
        "stale_fraction": ledger["stale"] / max(1, ledger["read"]),
        "compilations_after_warmup": sum(compilations),
        "learner_busy_fraction": _last(learner, "learner_busy_fraction"),
        "tokens_per_second": rate,
        "tokens_per_second_full_buffer": full_buffer_tokens_per_second,
        "tokens_per_second_vs_full_buffer": full_buffer_tokens_per_second and rate / full_buffer_tokens_per_second,
        "tokens_generated": audit.generated_tokens,
        "unreadable_shards": len(audit.unreadable),
        "goals": dataclasses.asdict(config.goals),
    }


def mean_staleness(audit: RunAudit) -> float:
    """Over all consumed trajectories."""
    total = sum(audit.staleness.values())
    return sum(value * count for value, count in audit.staleness.items()) / total if total else 0.0


def goals(summary: Mapping[str, Any]) -> Sequence[tuple[str, bool]]:
    """What the recipe promises (`GoalsConfig`) and every run must keep, and whether it holds; in words for people."""
    before, after = summary["success_before"]["value"], summary["success_after"]["value"]
    goal, of_full_buffer = summary["goals"], summary["tokens_per_second_vs_full_buffer"]
    found = [
        (f"held-out success at least {goal['success']:.0%}", after >= goal["success"]),
        (f"gained at least {goal['gain']:.0%}", after - before >= goal["gain"]),
        (f"at least {goal['num_actors']} actor processes", summary["num_actor_processes"] >= goal["num_actors"]),
        (
            f"trajectories of at least {goal['num_versions']} versions",
            summary["num_policy_versions"] >= goal["num_versions"],
        ),
        ("no gradient above the staleness bound", summary["staleness_violations"] == 0),
        ("no trajectory consumed twice", summary["consumed_twice"] == 0),
        (f"under {goal['stale_fraction']:.0%} of tokens stale", summary["stale_fraction"] < goal["stale_fraction"]),
        ("ledger exact", not summary["ledger_faults"]),
        ("no compilation after warm-up", summary["compilations_after_warmup"] == 0),
    ]
    if of_full_buffer is not None:
        text = f"learner at {goal['feed_ratio']:.0%} or more of its full-buffer rate"
        found.append((text, of_full_buffer >= goal["feed_ratio"]))
    return found

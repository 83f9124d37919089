"""The metrics row of a step, and what its update costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tunix_core.config import ModelConfig
from tunix_core.learner.batches import HostBatch
from tunix_core.models.flops import reference_flops, update_flops
from tunix_core.rl.staleness import histogram


def step_row(host: HostBatch, values: Mapping[str, float], *, clock: int, bound: int) -> dict[str, Any]:
    """Figures of a batch and what the step returned.

    Args:
        values: scalars from the compiled step, under their own names.
        clock: after the step.
        bound: `max_staleness`; the histogram has a column for each staleness up to it, and a batch nothing above it.
    """
    values, figures = dict(values), host.figures
    if values.get("equal_version_tokens") == 0:  # then the gap is unknown, not 0
        del values["logprob_gap_equal_version"], values["max_logprob_gap_equal_version"]
    return {
        **values,
        "clock": clock,
        "reward_mean": float(figures.rewards.mean()),
        "success_rate": float(figures.successes.mean()),
        "staleness_mean": float(figures.staleness.mean()),
        "staleness_max": int(figures.staleness.max()),
        **{f"staleness_{value}": int(count) for value, count in enumerate(histogram(figures.staleness, bound)[:-1])},
        "num_groups": figures.num_groups,
        "num_trajectories": len(figures.rewards),
        "num_tokens": host.num_tokens,
        "policy_tokens": host.policy_tokens,
        "num_windows": host.num_windows,
        "window_tokens": host.shape[1],
        "window_fill": host.num_tokens / math.prod(host.shape),
    }


def batch_flops(host: HostBatch, model: ModelConfig) -> dict[str, float]:
    """`model_flops` of the update, and beside them what the reference's forward pass takes."""
    lengths = host.figures.lengths
    return {
        "model_flops": float(update_flops(model, lengths)),
        "reference_flops": float(reference_flops(model, lengths)),
    }

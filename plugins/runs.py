"""Where the runs of this deployment live, and what is read of them for people.

The roots come from the environment of the deployment (`TUNIX_STORE_ROOTS`, separated by commas),
never from a DAG's params: a param only chooses among them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tunix_core import paths
from tunix_core.errors import ConfigError

ROOTS_VARIABLE = "TUNIX_STORE_ROOTS"


def store_roots() -> list[str]:
    """The configured roots, in order; the first is the default.

    Raises:
        ConfigError: none is configured.
    """
    roots = [root.strip() for root in os.environ.get(ROOTS_VARIABLE, "").split(",") if root.strip()]
    if not roots:
        raise ConfigError(
            ROOTS_VARIABLE, "", "one or more store URIs, separated by commas", "Set it in Airflow's environment."
        )
    return roots


def check_root(root: str) -> str:
    """Return `root` if it is a configured one.

    Raises:
        ConfigError: it is not.
    """
    if root not in store_roots():
        raise ConfigError("store_root", root, ", ".join(store_roots()), "Choose a configured root.")
    return root


def run_uri(root: str, dag_id: str, run_id: str) -> str:
    """Directory of an Airflow run's training run."""
    return f"{check_root(root).rstrip('/')}/{paths.run_name(dag_id, run_id)}"


def named_run_uri(root: str, name: str) -> str:
    """Directory of the run of that name, which is validated first."""
    return f"{check_root(root).rstrip('/')}/{paths.name('run', name)}"


def config_overrides(params: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    """Overrides of a recipe from a filled-in form.

    Args:
        params: the DAG run's params; an empty one (None) leaves the recipe's value.
        fields: param -> `section.field` of the configuration.
    """
    chosen = {field: params[param] for param, field in fields.items() if params.get(param) is not None}
    return {**chosen, **(params.get("overrides") or {})}


HEADLINES = {
    "state": "",
    "loss": "loss",
    "reward_mean": "reward",
    "mean_reward": "reward",
    "success_rate": "success",
    "success_fraction": "success",
    "success": "success",
    "staleness_mean": "staleness",
    "staleness_max": "at most",
    "published_version": "version",
    "version": "version",
    "num_refused": "refused",
    "refusal": "because",
    "learner_busy_fraction": "busy",
    "tokens_per_second": "tokens/s",
    "episodes": "episodes",
    "groups_in_flight": "groups in flight",
    "num_buffered_groups": "groups buffered",
    "num_live_actors": "actors",
    "lost_episodes": "lost episodes",
    "compilations_after_warmup": "compilations",
}
"""What a line about a process says of its progress, in this order, and how it calls it."""


def _number(value: float) -> str:
    if isinstance(value, float) and not (value.is_integer() or math.isnan(value) or math.isinf(value)):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _words(label: str, value: Any) -> str:
    if isinstance(value, bool) or value is None:
        shown = "-" if value is None else str(value).lower()
    elif isinstance(value, int | float):
        shown = _number(value)
    elif isinstance(value, Mapping):
        shown = f"({' '.join(_words(str(k).replace('_', ' '), v) for k, v in value.items())})"
    elif isinstance(value, Sequence) and not isinstance(value, str):
        shown = f"{len(value)} entries"
    else:
        shown = str(value)
    return f"{label} {shown}".strip()


def format_progress(progress: Mapping[str, Any]) -> str:
    """One line for people: `step 41/90 stepping reward 0.63 staleness 1.8 version 40 busy 0.81`.

    A process that reports known figures is described by those (`HEADLINES`), the ledger by its stale
    share; of any other process everything is shown. A heartbeat has no order, so this gives one.
    """
    words = []
    if "clock" in progress and "num_steps" in progress:
        words.append(f"step {_number(progress['clock'])}/{_number(progress['num_steps'])}")
    known = [_words(label, progress[key]) for key, label in HEADLINES.items() if progress.get(key) is not None]
    ledger = progress.get("ledger")
    if isinstance(ledger, Mapping) and ledger.get("read"):
        known.append(f"stale {100 * ledger.get('stale', 0) / ledger['read']:.1f} % of {_number(ledger['read'])} tokens")
    if not known:
        rest = ((key, value) for key, value in progress.items() if not words or key not in ("clock", "num_steps"))
        known = [_words(key.replace("_", " "), value) for key, value in rest if key != "incarnation"]
    return " ".join([*words, *known])

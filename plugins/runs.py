"""Where the runs of this deployment live, and what is read of them for people.

The roots come from the environment of the deployment (`TUNIX_STORE_ROOTS`, separated by commas),
never from a DAG's params: a param only chooses among them.
"""

from __future__ import annotations

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


def _number(value: float) -> str:
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(int(value))


def format_progress(progress: Mapping[str, Any]) -> str:
    """One line for people: `step 41/90 reward 0.63 staleness 1.8 version 40`.

    Any table of numbers and texts will do; `clock` beside `num_steps` becomes a fraction, and
    nested tables are flattened.
    """
    words = []
    if "clock" in progress and "num_steps" in progress:
        words.append(f"step {_number(progress['clock'])}/{_number(progress['num_steps'])}")
        progress = {k: v for k, v in progress.items() if k not in ("clock", "num_steps")}
    for key, value in progress.items():
        label = str(key).replace("_", " ")
        if isinstance(value, Mapping):
            words.append(f"{label} ({format_progress(value)})")
        elif isinstance(value, bool) or value is None:
            words.append(f"{label} {'-' if value is None else str(value).lower()}")
        elif isinstance(value, int | float):
            words.append(
                f"{label} {_number(value)}" if value == value and abs(value) != float("inf") else f"{label} {value}"
            )
        elif isinstance(value, Sequence) and not isinstance(value, str):
            words.append(f"{label} {len(value)} entries")
        else:
            words.append(f"{label} {value}")
    return " ".join(words)

"""`tunixctl simulate`: how a pool would do, before it is rented; and whether a finished run did as simulated."""

from __future__ import annotations

import argparse
import dataclasses
import html
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tunix_core.config import RunConfig
from tunix_core.config_loading import build, load_recipe, overridden, parse_overrides
from tunix_core.console import plots
from tunix_core.console.calibration import Measured, measure
from tunix_core.console.plots import Line
from tunix_core.console.report import page as report_page
from tunix_core.console.report import panels
from tunix_core.errors import ConfigError
from tunix_core.simulation.outcome import Outcome
from tunix_core.simulation.setting import Setting
from tunix_core.simulation.simulate import simulate
from tunix_core.storage.run_directory import read_run
from tunix_core.storage.store import open_store
from tunix_core.types import Order

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "capacity at the bound, first in first out": {
        "strategy": "fixed",
        "count_step": False,
        "order": "first_in_first_out",
    },
    "no pacing": {"strategy": "unpaced", "order": "first_in_first_out"},
    "synchronous": {"strategy": "synchronous"},
}
"""Rules to compare with; the capacity's target is the bound."""

_PRIORITIES: Mapping[str, Order] = {
    "oldest": "oldest_first",
    "freshest": "freshest_first",
    "advantage": "largest_advantage_first",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--run", help="URI of a run: its configuration, and group and step times as they were measured")
    source.add_argument("--recipe", help="a recipe's configuration; times as --set says")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a field of the setting, such as num_actors=256, sigma=1.6, faults.seconds_between_deaths=60",
    )
    parser.add_argument(
        "--priority", choices=sorted(_PRIORITIES), help="which groups make the next batch (the setting's `order`)"
    )
    parser.add_argument("--max-reuse", type=int, help="steps that may train on a group (the setting's `max_reuse`)")
    parser.add_argument("--hours", type=float, help="of virtual time (default: the run's own, or 25 minutes)")
    parser.add_argument("--compare", action="store_true", help="the published rules beside it")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--html", help="write a page with plots to this file")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """
    Raises:
        ConfigError: a setting that makes no sense, or a run that has measured nothing yet.
    """
    measured = None
    if arguments.run:
        store = open_store(arguments.run)
        config, _ = read_run(store)
        measured = measure(store, config)
        values = {**setting_of(config), **measured.fields()}
    else:
        values = setting_of(load_recipe(arguments.recipe)) if arguments.recipe else {}
    values = overridden(values, parse_overrides(arguments.set))
    if arguments.priority is not None:
        values["order"] = _PRIORITIES[arguments.priority]
    if arguments.max_reuse is not None:
        values["max_reuse"] = arguments.max_reuse
    if arguments.hours is not None:
        values["duration_seconds"] = arguments.hours * 3600
    setting: Setting = build(Setting, values)
    draw = measured.draw if measured else None
    outcomes: dict[str, Outcome] = {setting.strategy: simulate(setting, draw)}
    for name, fields in PUBLISHED.items() if arguments.compare else ():
        other = dataclasses.replace(setting, **{"target": setting.max_staleness, "max_reuse": 1, **fields})
        outcomes[name] = simulate(other, draw)
    _print(outcomes, measured, console)
    if arguments.json:
        found = {name: outcome.to_dict() for name, outcome in outcomes.items()}
        text = json.dumps({"setting": _plain(setting), "outcomes": found}, indent=2)
        _write(arguments.json, text, "--json")
    if arguments.html:
        _write(arguments.html, page(setting, outcomes, measured), "--html")
        console.print(f"plots: {arguments.html}")


def setting_of(config: RunConfig) -> dict[str, Any]:
    """The fields of a setting that a run's configuration knows."""
    return {
        "num_actors": config.actor.num_groups * config.actor.replicas,
        "groups_per_actor": config.actor.num_slots // config.algorithm.group_size,
        "group_size": config.algorithm.group_size,
        "groups_per_batch": config.learner.groups_per_batch,
        "max_staleness": config.staleness.max_staleness,
        "max_mean_staleness": config.staleness.max_mean_staleness,
        "max_throttle_seconds": config.staleness.max_throttle_seconds,
        "snapshot_interval_steps": config.learner.snapshot_interval_steps,
        "flush_seconds": config.actor.flush_seconds,
        "control_interval_seconds": config.staleness.control_interval_seconds,
        "control_delay_seconds": config.actor.poll_seconds,
        "order": config.staleness.consumption_order,
        "max_reuse": config.staleness.max_reuse,
    }


def _print(outcomes: Mapping[str, Outcome], measured: Measured | None, console: Console) -> None:
    table = Table("", "steps", "learner busy", "tokens discarded", "mean staleness", "oldest", "longest gap")
    for name, out in outcomes.items():
        table.add_row(
            name,
            str(len(out.steps)),
            f"{out.busy_fraction:.1%}",
            f"{out.discarded_token_fraction:.1%}",
            f"{out.mean_staleness:.2f}",
            str(out.max_staleness),
            f"{out.longest_gap_seconds:.0f} s",
        )
    if measured:
        table.add_row(
            "the run, measured",
            str(measured.num_steps),
            f"{measured.busy_fraction:.1%}",
            f"{measured.discarded_token_fraction:.1%}",
            f"{measured.mean_staleness:.2f}",
            str(max(measured.staleness, default=0)),
            "",
        )
    console.print(table)
    if measured:
        first = next(iter(outcomes.values()))
        console.print(
            f"share of trajectories that differ in staleness: {distance(first.staleness, measured.staleness):.1%}"
        )


def distance(one: Mapping[int, int], other: Mapping[int, int]) -> float:
    """Total variation distance of two histograms: the share that would have to move."""
    ages = sorted({*one, *other})
    shares = [np.array([counts.get(age, 0) for age in ages], np.float64) for counts in (one, other)]
    return float(np.abs(shares[0] / max(1, shares[0].sum()) - shares[1] / max(1, shares[1].sum())).sum() / 2)


def page(setting: Setting, outcomes: Mapping[str, Outcome], measured: Measured | None) -> str:
    """A self-contained HTML page."""
    hours = {name: np.array([step.ended_at for step in out.steps]) / 3600 for name, out in outcomes.items()}

    def lines(read: str, names: Iterable[str]) -> list[Line]:
        found = []
        for name in names:
            out = outcomes[name]
            values = np.array([getattr(step, read) for step in out.steps], np.float64)
            found.append(Line(name, hours[name], plots.smooth(values, max(1, len(values) // 100))))
        return found

    with_target = [name for name in outcomes if name not in ("no pacing", "unpaced", "synchronous")]
    histograms = {name: out.staleness for name, out in outcomes.items()}
    if measured:
        histograms["the run, measured"] = measured.staleness
    ages = range(setting.max_staleness + 1)
    histogram_boxes = [
        (
            f"Staleness at consumption: {name}",
            plots.histogram(
                list(ages), [counts.get(age, 0) for age in ages], title=f"staleness, {name}", x_label="steps"
            ),
            "",
        )
        for name, counts in histograms.items()
    ]
    line_boxes = [
        (title, plots.line_plot(lines(read, names), title=title, x_label="hours"), "")
        for title, read, names in (
            ("Mean staleness", "staleness_mean", outcomes),
            ("Target, batches of headroom", "target", with_target),
            ("Groups ready for the next step", "queued", outcomes),
            ("Groups in flight", "in_flight", outcomes),
        )
    ]
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td class='n'>{len(out.steps)}</td><td class='n'>{out.busy_fraction:.1%}</td>"
        f"<td class='n'>{out.discarded_token_fraction:.1%}</td><td class='n'>{out.mean_staleness:.2f}</td></tr>"
        for name, out in outcomes.items()
    )
    figures = (
        "<table><tr><th>rule</th><th class='n'>steps</th><th class='n'>learner busy</th>"
        f"<th class='n'>tokens discarded</th><th class='n'>mean staleness</th></tr>{rows}</table>"
    )
    title = f"{setting.num_actors:,} actors, {setting.groups_per_batch} groups per step of {setting.step_seconds:g} s"
    body = (
        f"<header><h1>{html.escape(title)}</h1><div class='muted'>simulated: {setting.duration_seconds / 3600:.1f} hours, "
        f"staleness bound {setting.max_staleness}, seed {setting.seed}</div></header>{figures}"
        f"{panels(histogram_boxes, 'Staleness')}{panels(line_boxes, 'Over time')}"
        f"<details><summary>Setting</summary><pre>{html.escape(json.dumps(_plain(setting), indent=2))}</pre></details>"
    )
    return report_page(title, body)


def _plain(setting: Setting) -> dict[str, Any]:
    """For JSON, which has no infinity."""
    values = dataclasses.asdict(setting)
    return {name: None if value == float("inf") else value for name, value in values.items()}


def _write(path: str, text: str, option: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise ConfigError(option, path, "a file that can be written", f"{error.strerror}.") from error

"""What a person sees while a run goes on: read from the run directory, not from Airflow."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tunix_core.errors import StoreError
from tunix_core.storage.control import read_heartbeats
from tunix_core.storage.store import ObjectStore
from tunix_core.types import LEDGER_CLASSES

_BLOCKS = "▁▂▃▄▅▆▇█"
_STATE_STYLE = {
    "success": "green",
    "running": "cyan",
    "deferred": "cyan",
    "failed": "bold red",
    "up_for_retry": "yellow",
}


@dataclasses.dataclass
class RunView:
    """The last heartbeats of a run, and the course of success over its steps."""

    beats: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    success: collections.OrderedDict[int, float] = dataclasses.field(default_factory=collections.OrderedDict)

    @property
    def learner(self) -> Mapping[str, Any]:
        return self.beats.get("learner", {})

    @property
    def actors(self) -> dict[str, Mapping[str, Any]]:
        return {name: beat for name, beat in sorted(self.beats.items()) if name.startswith("actor")}

    def refresh(self, store: ObjectStore) -> None:
        """Read the heartbeats; a store that does not answer leaves the old ones."""
        try:
            self.beats = {name: beat.progress for name, beat in read_heartbeats(store).items()}
        except StoreError:
            return
        if "success_rate" in self.learner:
            self.success[int(self.learner["clock"])] = float(self.learner["success_rate"])

    def line(self) -> str:
        """One plain line for a log."""
        learner = self.learner
        if "reward_mean" not in learner:
            warm = self.beats.get("warm_start")
            if warm and not learner:
                return f"warm start: step {warm['num_steps']} held-out success {warm['success']:.3f}"
            return f"learner {learner.get('state', 'not started')}, {len(self.actors)} actors"
        ledger = learner["ledger"]
        return (
            f"step {learner['clock']}/{learner['num_steps']} reward {learner['reward_mean']:.3f} "
            f"success {learner['success_rate']:.3f} staleness {learner['staleness_mean']:.2f} "
            f"version {learner['published_version']} busy {learner['learner_busy_fraction']:.2f} "
            f"tokens/s {learner['tokens_per_second']:.0f} read {ledger['read']} stale {ledger['stale']} "
            f"actors {sum(float(a.get('tokens_per_second', 0)) for a in self.actors.values()):.0f} tok/s"
        )


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Values in [0, 1] as blocks; the last `width` of them."""
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, int(max(0.0, v) * len(_BLOCKS)))] for v in list(values)[-width:])


def render(view: RunView, *, title: str, tasks: Mapping[str, str | None], address: str) -> RenderableType:
    """The whole view, redrawn on each refresh."""
    return Group(
        Panel(_progress(view), title=title, title_align="left", border_style="blue"),
        Panel(_tokens(view), title="tokens by ledger class", title_align="left", border_style="blue"),
        Panel(_actors(view), title="actors", title_align="left", border_style="blue"),
        Panel(_tasks(tasks), title=f"Airflow  {address}", title_align="left", border_style="blue"),
    )


def _grid(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", min_width=18)
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    return table


def _progress(view: RunView) -> RenderableType:
    learner = view.learner
    if "reward_mean" not in learner:
        return Text(view.line())
    return _grid(
        [
            ("step", f"{learner['clock']} of {learner['num_steps']}  ({learner['state']})"),
            ("reward / success", f"{learner['reward_mean']:.3f} / {learner['success_rate']:.3f}"),
            ("success by step", sparkline(list(view.success.values()))),
            ("staleness", f"mean {learner['staleness_mean']:.2f}, oldest {learner['staleness_max']}"),
            ("policy version", f"{learner['published_version']} published"),
            ("learner busy", f"{learner['learner_busy_fraction']:.1%}, {learner['tokens_per_second']:.0f} tokens/s"),
            ("model FLOPs", _utilization(learner)),
            ("last step", _step_times(learner)),
        ]
    )


def _utilization(learner: Mapping[str, Any]) -> str:
    peak = learner["peak_flops_per_second"]
    return f"{learner['model_flops_utilization']:.1%} of {peak / 1e9:,.0f} GFLOP/s"


def _step_times(learner: Mapping[str, Any]) -> str:
    """`2.00 s = device 1.50 + wait for data 0.25 + …`; parts without time stay out."""
    times = dict(learner["step_times"])
    wall = times.pop("step_wall_seconds")
    shown = [
        f"{name.removesuffix('_seconds').replace('_', ' ')} {seconds:.2f}"
        for name, seconds in sorted(times.items(), key=lambda item: -item[1])
        if seconds >= 0.005
    ]
    return f"{wall:.2f} s = {' + '.join(shown)}" if shown else f"{wall:.2f} s"


def _tokens(view: RunView) -> RenderableType:
    ledger = view.learner.get("ledger", {})
    shown = ["read", *(name for name in LEDGER_CLASSES if ledger.get(name))]
    return _grid([(name, f"{ledger.get(name, 0):,}") for name in shown])


def _actors(view: RunView) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("process", "version", "tokens/s", "episodes", "groups in flight", "waiting for tools", "failures"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for name, actor in view.actors.items():
        table.add_row(
            name,
            str(actor.get("version", "")),
            f"{actor.get('tokens_per_second', 0):.0f}",
            str(actor.get("episodes", "")),
            f"{actor.get('groups_in_flight', 0)} of {actor.get('groups_allowed', 0)}",
            str(actor.get("slots_waiting_for_tools", "")),
            str(actor.get("failed_attempts", "")),
        )
    return table


def _tasks(tasks: Mapping[str, str | None]) -> RenderableType:
    text = Text()
    for name, state in tasks.items():
        text.append(f"{name} ", style="dim")
        text.append(f"{state or 'pending'}   ", style=_STATE_STYLE.get(state or "", ""))
    return text

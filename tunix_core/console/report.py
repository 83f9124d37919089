"""The report of a run as one self-contained HTML page."""

from __future__ import annotations

import html
import importlib.resources
import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunix_core.config import RunConfig, config_to_dict
from tunix_core.console import plots
from tunix_core.console.plots import Bar, Line
from tunix_core.evaluation.audit import RunAudit
from tunix_core.evaluation.held_out import HeldOutEvaluation
from tunix_core.evaluation.summary import goals
from tunix_core.types import LEDGER_CLASSES

NUM_DIALOGUES = 4
SMOOTHING_STEPS = 7

Metrics = Mapping[str, np.ndarray]


def render(
    summary: Mapping[str, Any],
    config: RunConfig,
    learner: Metrics,
    audit: RunAudit,
    before: HeldOutEvaluation,
    after: HeldOutEvaluation,
) -> str:
    """The page.

    Args:
        summary: from `evaluation.summary.build_summary`.
        learner: its metrics, a row per step.
    """
    steps = _steps(learner)
    body = "\n".join(
        [
            _header(summary, config),
            _cards(summary),
            _panels(_learning(steps), "Learning"),
            _panels(_freshness(steps, audit, config, summary), "Freshness and what became of every token"),
            f'<div class="bound"><b>What bounds it.</b> {html.escape(bound_sentence(steps, summary))}</div>',
            _panels(_machinery(steps), "Machinery"),
            _dialogues(before, after),
            _config(config),
        ]
    )
    template = (importlib.resources.files("tunix_core.console") / "report_template.html").read_text()
    return string.Template(template).substitute(title=f"{config.recipe}, seed {config.seed}: run report", body=body)


def _steps(learner: Metrics) -> dict[str, np.ndarray]:
    """The rows of steps, each step's last one (a step may have been executed again), in order."""
    if "loss" not in learner:
        return {}
    clock = learner["clock"].astype(np.float64)
    is_step = np.isfinite(learner["loss"].astype(np.float64))
    last = {int(c): i for i, c in enumerate(clock) if is_step[i]}
    rows = np.array([last[c] for c in sorted(last)], np.int64)
    return {name: values[rows] for name, values in learner.items() if values.dtype != object}


def _series(steps: Metrics, name: str) -> np.ndarray:
    size = len(steps.get("clock", ()))
    return np.asarray(steps.get(name, np.full(size, np.nan)), np.float64)


def _smoothed(label: str, x: np.ndarray, y: np.ndarray, color: int = 0) -> list[Line]:
    return [Line("", x, y, faint=True, color=color), Line(label, x, plots.smooth(y, SMOOTHING_STEPS), color=color)]


def _header(summary: Mapping[str, Any], config: RunConfig) -> str:
    checks = "".join(
        f'<li class="{"met" if met else "missed"}">{html.escape(text)}</li>' for text, met in goals(summary)
    )
    return (
        f"<header><h1>{html.escape(config.recipe)}, seed {config.seed}</h1>"
        f'<div class="muted">{summary["num_steps"]} steps of {config.batch_trajectories} trajectories, '
        f"{summary['num_actor_processes']} actor processes, {summary['wall_seconds'] / 60:.1f} minutes from "
        f'preparation to report</div><ul class="goals">{checks}</ul></header>'
    )


def _cards(summary: Mapping[str, Any]) -> str:
    before, after = summary["success_before"], summary["success_after"]
    cards = [
        (
            "wide",
            f"{before['value']:.1%} → {after['value']:.1%}",
            f"held-out greedy success, {after['n']} tasks "
            f"(95 %: {before['low']:.1%} to {before['high']:.1%} → {after['low']:.1%} to {after['high']:.1%})",
        ),
        ("", f"{summary['num_policy_versions']}", "policy versions that generated trajectories"),
        ("", f"{summary['mean_staleness']:.2f}", f"mean staleness, bound {summary['max_staleness']}"),
        ("", f"{summary['stale_fraction']:.1%}", "of tokens read discarded as stale"),
        ("", f"{summary['tokens_per_second_vs_full_buffer']:.2f}", "of the learner's full-buffer token rate"),
        ("", f"{summary['learner_busy_fraction']:.1%}", "learner busy once warm"),
        ("", f"{summary['tokens_generated']:,}".replace(",", "\u202f"), "policy tokens generated"),
    ]
    return (
        '<div class="cards">'
        + "".join(f'<div class="card {kind}"><b>{value}</b><span>{text}</span></div>' for kind, value, text in cards)
        + "</div>"
    )


def _panels(panels: Sequence[tuple[str, str, str]], heading: str) -> str:
    boxes = "".join(
        f'<div class="panel"><h3>{html.escape(title)}</h3>{svg}<div class="note">{html.escape(note)}</div></div>'
        for title, svg, note in panels
    )
    return f'<h2>{html.escape(heading)}</h2><div class="grid">{boxes}</div>'


def _minutes(steps: Metrics) -> np.ndarray:
    time = _series(steps, "time")
    return (time - time[0]) / 60 if len(time) else time


def _learning(steps: Metrics) -> list[tuple[str, str, str]]:
    minutes, tokens = _minutes(steps), np.cumsum(_series(steps, "num_tokens")) / 1e3
    reward, success = _series(steps, "reward_mean"), _series(steps, "success_rate")

    def curve(x: np.ndarray, x_label: str) -> str:
        lines = [*_smoothed("success", x, success, 0), *_smoothed("reward", x, reward, 1)]
        return plots.line_plot(
            lines, title="Success and reward", x_label=x_label, y_format=plots.percent, y_limits=(0, 1)
        )

    note = "Of the trajectories each step consumed, sampled at the training temperature."
    return [
        ("Success and reward over time", curve(minutes, "minutes since the first step"), note),
        ("Success and reward over tokens", curve(tokens, "thousand tokens consumed"), note),
        (
            "KL divergence",
            plots.line_plot(
                [
                    *_smoothed("to the reference", minutes, _series(steps, "kl_reference"), 0),
                    *_smoothed("to the behavior policy", minutes, _series(steps, "kl_behavior"), 1),
                ],
                title="KL divergence",
                x_label="minutes since the first step",
            ),
            "k3 estimates, nats per policy token.",
        ),
        (
            "Entropy and effective sample size",
            plots.line_plot(
                [
                    *_smoothed("entropy (nats)", minutes, _series(steps, "entropy"), 0),
                    *_smoothed("effective sample fraction", minutes, _series(steps, "effective_sample_fraction"), 1),
                ],
                title="Entropy and effective sample size",
                x_label="minutes since the first step",
            ),
            "Effective sample size of the importance ratios, as a share of the batch's policy tokens.",
        ),
    ]


def _freshness(
    steps: Metrics, audit: RunAudit, config: RunConfig, summary: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    bound = config.staleness.max_staleness
    ages = list(range(max(bound, audit.max_staleness_seen) + 1))
    minutes = _minutes(steps)
    ledger = summary["ledger"]
    faults = summary["ledger_faults"]
    verdict = "; ".join(faults) if faults else "the classes add up to what was read, to the token"
    return [
        (
            "Staleness of consumed trajectories",
            plots.histogram(
                ages,
                [audit.staleness.get(age, 0) for age in ages],
                title="Staleness",
                x_label="steps between generation and consumption",
                mark=(bound + 0.5, "bound"),
            ),
            f"Computed from step records and shards: {audit.staleness_violations} above the bound of {bound}.",
        ),
        (
            "Staleness over time",
            plots.line_plot(
                [
                    Line("mean of the batch", minutes, _series(steps, "staleness_mean")),
                    Line("oldest of the batch", minutes, _series(steps, "staleness_max")),
                ],
                title="Staleness over time",
                x_label="minutes since the first step",
                marks=[(bound, "bound")],
            ),
            "In steps, at consumption.",
        ),
        (
            "Ledger",
            plots.stacked_bar([Bar(name, float(ledger[name])) for name in LEDGER_CLASSES], title="Ledger")
            + _ledger_table(ledger),
            f"{ledger['read']:,} tokens read; {verdict}.".replace(",", "\u202f"),
        ),
    ]


def _ledger_table(ledger: Mapping[str, int]) -> str:
    rows = "".join(
        f'<tr><td>{name}</td><td class="n">{ledger[name]:,}</td></tr>'.replace(",", "\u202f")
        for name in ("read", *LEDGER_CLASSES)
    )
    return f'<table><tr><th>class</th><th class="n">tokens</th></tr>{rows}</table>'


def _machinery(steps: Metrics) -> list[tuple[str, str, str]]:
    minutes = _minutes(steps)
    device, wait = _series(steps, "device_seconds"), _series(steps, "wait_for_data_seconds")
    pack = _series(steps, "pack_seconds")
    return [
        (
            "Learner busy",
            plots.line_plot(
                [Line("busy since warm", minutes, _series(steps, "learner_busy_fraction"))],
                title="Learner busy",
                x_label="minutes since the first step",
                y_format=plots.percent,
                y_limits=(0, 1),
            ),
            "Device time of first-use updates over wall time once warm.",
        ),
        (
            "Where a step's time goes",
            plots.stacked_areas(
                minutes,
                {"device": device, "waiting for data": wait},
                title="Step time",
                x_label="minutes since the first step",
                y_label="seconds",
            ),
            f"Packing takes {np.nanmean(pack) * 1e3:.0f} ms a step and runs while the device works."
            if np.isfinite(pack).any()
            else "",
        ),
        (
            "Real tokens per second",
            plots.line_plot(
                [Line("mean since warm", minutes, _series(steps, "tokens_per_second"))],
                title="Tokens per second",
                x_label="minutes since the first step",
            ),
            "Tokens of trajectories through the learner, padding excluded.",
        ),
        (
            "Window fill",
            plots.line_plot(
                [Line("fill", minutes, _series(steps, "window_fill"))],
                title="Window fill",
                x_label="minutes since the first step",
                y_format=plots.percent,
                y_limits=(0, 1),
            ),
            "Real tokens over the tokens of the windows that are computed.",
        ),
    ]


def bound_sentence(steps: Metrics, summary: Mapping[str, Any]) -> str:
    """What limits the run's token rate, from its own figures."""
    device = float(np.nansum(_series(steps, "device_seconds")))
    wait = float(np.nansum(_series(steps, "wait_for_data_seconds")))
    total = max(device + wait, 1e-9)
    ratio = summary["tokens_per_second_vs_full_buffer"]
    share = f"{wait / total:.0%} of the learner's time went into waiting for data, {device / total:.0%} into updates."
    if wait / total > 0.15:
        return f"The actors: {share} The learner ran at {ratio:.2f} of its rate from a full buffer on the same core."
    if ratio < 0.85:
        return (
            f"The shared core: {share} Yet it ran at {ratio:.2f} of its rate from a full buffer: ingestion, snapshots "
            "and checkpoints share its core with the updates."
        )
    return f"The learner's own core: {share} It ran at {ratio:.2f} of its rate from a full buffer."


def _dialogues(before: HeldOutEvaluation, after: HeldOutEvaluation) -> str:
    """Transcripts of the same tasks by both versions, first those that the first one failed."""
    later = {t["task_seed"]: t for t in after.transcripts}
    pairs = [(t, later[t["task_seed"]]) for t in before.transcripts if t["task_seed"] in later]
    pairs.sort(key=lambda pair: (pair[0]["success"], not pair[1]["success"]))
    heads = "".join(f"<h3>version {e.policy_version}</h3>" for e in (before, after))
    boxes = "".join(_dialogue(side) for pair in pairs[:NUM_DIALOGUES] for side in pair)
    return f'<h2>The same held-out tasks, before and after</h2><div class="dialogues">{heads}{boxes}</div>'


def _dialogue(transcript: Mapping[str, Any]) -> str:
    lines = "".join(
        f'<div class="{html.escape(m["role"])}"><span class="role">{html.escape(m["role"])}</span>'
        f'<span class="said">{html.escape(m["content"])}</span></div>'
        for m in transcript["messages"]
    )
    kind, word = ("good", "solved") if transcript["success"] else ("bad", "not solved")
    return f'<div class="panel dialogue">{lines}<div class="verdict {kind}">{word}</div></div>'


def _config(config: RunConfig) -> str:
    sections = []
    for section, values in config_to_dict(config).items():
        if isinstance(values, dict):
            rows = "".join(
                f"<tr><td>{html.escape(key)}</td><td>{html.escape(str(value))}</td></tr>"
                for key, value in values.items()
            )
            sections.append(f"<section><h3>{html.escape(section)}</h3><table>{rows}</table></section>")
    return f'<h2>Configuration</h2><div class="config">{"".join(sections)}</div>'

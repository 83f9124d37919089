"""The report of a run as one self-contained HTML page."""

from __future__ import annotations

import html
import importlib.resources
import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunix_core.config import RunConfig
from tunix_core.config_loading import config_to_dict
from tunix_core.console import plots
from tunix_core.console.plots import Bar, Line
from tunix_core.evaluation.audit import RunAudit
from tunix_core.evaluation.held_out import HeldOutEvaluation
from tunix_core.evaluation.summary import goals
from tunix_core.types import LEDGER_CLASSES

NUM_DIALOGUES = 4
SMOOTHING_STEPS = 7
MINUTES = "minutes since the first step"

Metrics = Mapping[str, np.ndarray]


def render(
    summary: Mapping[str, Any],
    config: RunConfig,
    learner: Metrics,
    audit: RunAudit,
    before: HeldOutEvaluation,
    after: HeldOutEvaluation,
    actors: Mapping[str, Metrics],
) -> str:
    """The page.

    Args:
        summary: from `evaluation.summary.build_summary`.
        learner: its metrics, a row per step.
        actors: each actor process's metrics.
    """
    steps = step_rows(learner)
    body = "\n".join(
        [
            _header(summary, config),
            _cards(summary),
            f'<div class="bound"><b>What bounds it.</b> {html.escape(bound_sentence(steps, summary))}</div>',
            panels(_learning(steps, before, after), "Learning"),
            panels(_stability(steps), "Stability"),
            panels(_freshness(steps, audit, config), "Freshness"),
            _ledger(summary),
            panels(_machinery(steps, actors), "Machinery"),
            _dialogues(before, after),
            _config(config),
        ]
    )
    return page(f"{config.recipe}, seed {config.seed}: run report", body)


def page(title: str, body: str) -> str:
    """A self-contained HTML page around `body`, which is HTML; `title` is text."""
    template = (importlib.resources.files("tunix_core.console") / "report_template.html").read_text()
    return string.Template(template).substitute(title=html.escape(title), body=body)


def step_rows(learner: Metrics) -> dict[str, np.ndarray]:
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
    ratio = summary["tokens_per_second_vs_full_buffer"]
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
        *([("", f"{ratio:.2f}", "of the learner's full-buffer token rate")] if ratio is not None else []),
        ("", f"{summary['learner_busy_fraction']:.1%}", "learner busy once warm"),
        ("", _thousands(summary["tokens_generated"]), "policy tokens generated"),
    ]
    return (
        '<div class="cards">'
        + "".join(f'<div class="card {kind}"><b>{value}</b><span>{text}</span></div>' for kind, value, text in cards)
        + "</div>"
    )


def panels(boxes: Sequence[tuple[str, str, str]], heading: str) -> str:
    """Plots under a heading: title, SVG and note of each, the last one empty where there is nothing to say."""
    parts = [
        f'<div class="panel"><h3>{html.escape(title)}</h3>{svg}'
        + (f'<div class="note">{html.escape(note)}</div>' if note else "")
        + "</div>"
        for title, svg, note in boxes
    ]
    return f'<h2>{html.escape(heading)}</h2><div class="grid">{"".join(parts)}</div>'


def _minutes(steps: Metrics) -> np.ndarray:
    time = _series(steps, "time")
    return (time - time[0]) / 60 if len(time) else time


def _learning(steps: Metrics, before: HeldOutEvaluation, after: HeldOutEvaluation) -> list[tuple[str, str, str]]:
    minutes, tokens = _minutes(steps), np.cumsum(_series(steps, "num_tokens")) / 1e3
    reward, success = _series(steps, "reward_mean"), _series(steps, "success_rate")

    def curve(x: np.ndarray, x_label: str) -> str:
        lines = _smoothed("success while training", x, success, 0)
        if not np.allclose(reward, success, equal_nan=True):
            lines += _smoothed("reward while training", x, reward, 2)
        if len(x):
            ends = np.array([x[0], x[-1]])
            held_out = np.array([before.success.value, after.success.value])
            lines.append(Line("held-out greedy success, first and last version", ends, held_out, color=1, points=True))
        return plots.line_plot(
            lines, title="Success and reward", x_label=x_label, y_format=plots.percent, y_limits=(0, 1)
        )

    same = " Reward and success are the same number here." if np.allclose(reward, success, equal_nan=True) else ""
    note = f"Of the trajectories each step consumed, sampled at the training temperature.{same}"
    return [
        ("Success and reward over time", curve(minutes, MINUTES), note),
        ("Success and reward over tokens", curve(tokens, "thousand tokens consumed"), note),
    ]


def _stability(steps: Metrics) -> list[tuple[str, str, str]]:
    minutes = _minutes(steps)

    def plot(title: str, *names: tuple[str, str]) -> str:
        lines = [
            line for i, (name, label) in enumerate(names) for line in _smoothed(label, minutes, _series(steps, name), i)
        ]
        return plots.line_plot(lines, title=title, x_label=MINUTES)

    return [
        (
            "KL divergence",
            plot("KL divergence", ("kl_reference", "to the reference"), ("kl_behavior", "to the behavior policy")),
            "k3 estimates, nats per policy token.",
        ),
        ("Entropy", plot("Entropy", ("entropy", "entropy")), "Nats per policy token, at the sampling temperature."),
        (
            "Effective sample size and clipping",
            plot(
                "Effective sample size and clipping",
                ("effective_sample_fraction", "effective sample size"),
                ("clip_fraction", "clipped"),
            ),
            "Shares of the batch's policy tokens.",
        ),
        ("Gradient norm", plot("Gradient norm", ("gradient_norm", "gradient norm")), "Before clipping."),
        _equal_version(steps),
    ]


def _equal_version(steps: Metrics) -> tuple[str, str, str]:
    minutes = _minutes(steps)
    names = {"logprob_gap_equal_version": "mean", "max_logprob_gap_equal_version": "largest"}
    return (
        "Sampler against learner, at equal version",
        plots.line_plot(
            [Line(label, minutes, _series(steps, name), points=True) for name, label in names.items()],
            title="Log probability gap at equal version",
            x_label=MINUTES,
        ),
        "Gap of a token's log probability where the weights that sampled it are those that the step started from: "
        "anything but rounding is a fault. Steps without such tokens have no point.",
    )


def _freshness(steps: Metrics, audit: RunAudit, config: RunConfig) -> list[tuple[str, str, str]]:
    bound = config.staleness.max_staleness
    ages = list(range(max(bound, audit.max_staleness_seen) + 1))
    minutes = _minutes(steps)
    return [
        (
            "Staleness of consumed trajectories",
            plots.histogram(
                ages,
                [audit.staleness.get(age, 0) for age in ages],
                title="Staleness",
                x_label="steps between generation and consumption",
                mark=(bound, "bound"),
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
                x_label=MINUTES,
                marks=[(bound, "bound")],
            ),
            "In steps, at consumption.",
        ),
    ]


def _ledger(summary: Mapping[str, Any]) -> str:
    ledger, faults = summary["ledger"], summary["ledger_faults"]
    verdict = "; ".join(faults) if faults else "the classes add up to what was read, to the token"
    heads = "".join(f'<th class="n">{name}</th>' for name in ("read", *LEDGER_CLASSES))
    cells = "".join(f'<td class="n">{_thousands(ledger[name])}</td>' for name in ("read", *LEDGER_CLASSES))
    bar = plots.stacked_bar([Bar(name, float(ledger[name])) for name in LEDGER_CLASSES], title="Ledger")
    return (
        f'<h2>What became of every token</h2><div class="panel">{bar}'
        f'<div class="scroll"><table><tr>{heads}</tr><tr>{cells}</tr></table></div>'
        f'<div class="note">Tokens read by the learner, by class: {html.escape(verdict)}.</div></div>'
    )


def _thousands(count: int) -> str:
    """Digits in groups of three, set apart by a narrow space."""
    return f"{count:,}".replace(",", "\u202f")


STEP_PARTS = {
    "device": "device_seconds",
    "waiting for data": "wait_for_data_seconds",
    "throttled": "throttled_seconds",
    "packing": "pack_seconds",
    "transfer": "transfer_seconds",
    "other": "other_seconds",
}
"""Label -> column. The learner attributes each moment to one of them."""


def step_times(steps: Metrics) -> dict[str, np.ndarray]:
    """Seconds of each step by part; together they are its wall time.

    Steps that were executed again, the one after them, and the first of all (it waits for the pool to start) have
    none: NaN.
    """
    replayed = _series(steps, "replayed") > 0
    usable = ~replayed
    usable[:1] = False
    usable[1:] &= ~replayed[:-1]
    return {label: np.where(usable, _series(steps, name), np.nan) for label, name in STEP_PARTS.items()}


def _machinery(steps: Metrics, actors: Mapping[str, Metrics]) -> list[tuple[str, str, str]]:
    minutes, times = _minutes(steps), step_times(steps)
    total = np.sum(list(times.values()), axis=0)
    prepare = _series(steps, "prepare_seconds")
    packing = (
        f" A batch takes {np.nanmean(prepare) * 1e3:.0f} ms to prepare; only what the learner stood still for is shown."
        if np.isfinite(prepare).any()
        else ""
    )
    return [
        (
            "Learner busy",
            plots.line_plot(
                [
                    *_smoothed("around each step", minutes, times["device"] / total, 0),
                    Line("mean since warm", minutes, _series(steps, "learner_busy_fraction"), color=1),
                ],
                title="Learner busy",
                x_label=MINUTES,
                y_format=plots.percent,
                y_limits=(0, 1),
            ),
            "Device time of first-use updates over wall time.",
        ),
        (
            "Where a step's time goes",
            plots.stacked_areas(minutes, times, title="Step time", x_label=MINUTES, y_label=" s"),
            f"From the end of one step to the end of the next.{packing}",
        ),
        _utilization(steps, total),
        (
            "Learner: real tokens per second",
            plots.line_plot(
                [
                    *_smoothed("around each step", minutes, _series(steps, "num_tokens") / total, 0),
                    Line("mean since warm", minutes, _series(steps, "tokens_per_second"), color=1),
                ],
                title="Tokens per second",
                x_label=MINUTES,
            ),
            _window_note(steps),
        ),
        (
            "Actors: policy tokens per second",
            plots.line_plot(_actor_lines(steps, actors), title="Actor tokens per second", x_label=MINUTES),
            "Generated tokens of each process; the time spent waiting for tools is included.",
        ),
    ]


def _utilization(steps: Metrics, total_seconds: np.ndarray) -> tuple[str, str, str]:
    minutes, peak = _minutes(steps), _series(steps, "peak_flops_per_second")
    own = _series(steps, "model_flops") / (total_seconds * peak)
    known = peak[np.isfinite(peak)]
    against = f" of {plots.number(float(known[-1]) / 1e9)} GFLOP/s" if len(known) else ""
    return (
        "Model FLOPs utilisation",
        plots.line_plot(
            [
                *_smoothed("around each step", minutes, own, 0),
                Line("mean since warm", minutes, _series(steps, "model_flops_utilization"), color=1),
            ],
            title="Model FLOPs utilisation",
            x_label=MINUTES,
            y_format=plots.percent,
        ),
        f"What the updates need by arithmetic, as a share{against}; the reference's pass and recomputation do not count.",
    )


def _window_note(steps: Metrics) -> str:
    fill = _series(steps, "window_fill")
    full = f" Windows are {np.nanmean(fill):.0%} full on average." if np.isfinite(fill).any() else ""
    return f"Tokens of trajectories, padding excluded.{full}"


def _actor_lines(steps: Metrics, actors: Mapping[str, Metrics]) -> list[Line]:
    start = _series(steps, "time")[:1]
    lines = []
    for place, (name, rows) in enumerate(sorted(actors.items())):
        if len(start) and "tokens_per_second" in rows:
            minutes = (np.asarray(rows["time"], np.float64) - start[0]) / 60
            lines += _smoothed(name, minutes, np.asarray(rows["tokens_per_second"], np.float64), place)
    return lines


def bound_sentence(steps: Metrics, summary: Mapping[str, Any]) -> str:
    """What limits the run's token rate, from its own figures."""
    sums = {name: float(np.nansum(values)) for name, values in step_times(steps).items()}
    total = sum(sums.values())
    if total <= 0:
        return "Too few steps to tell."
    share = {
        "device": sums["device"] / total,
        "wait": (sums["waiting for data"] + sums["throttled"]) / total,
        "host": (sums["packing"] + sums["transfer"] + sums["other"]) / total,
    }
    split = (
        f"of the learner's time {share['device']:.0%} went into updates on the device, {share['wait']:.0%} into waiting "
        f"for data and {share['host']:.0%} into work of the host between updates."
    )
    ratio = summary["tokens_per_second_vs_full_buffer"]
    rate = f"It trained on {summary['tokens_per_second']:.0f} tokens/s"
    rate += "." if ratio is None else f", {ratio:.2f} of its rate from a full buffer on the same core."
    if share["wait"] >= max(0.1, share["host"]):
        cause = "The actors bound it"
    elif share["host"] > 0.1:
        cause = "The host bounds it"
    else:
        cause = "The device bounds it"
    return f"{cause}: {split} {rate}"


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

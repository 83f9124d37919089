"""Plots as inline SVG text, without a plotting library: small, sharp and self-contained.

Every function returns one `<svg>` element that scales to the width of its parent. Colors come from
one restrained palette; text uses the page's font. Non-finite points break a line.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

INK = "#1f2933"
MUTED = "#7b8794"
GRID = "#e4e7eb"
PALETTE = ("#2f6f9f", "#c8553d", "#5b8c5a", "#b08900", "#7a5c99", "#8c8c8c", "#3a9e9e", "#a0522d")

WIDTH = 560
HEIGHT = 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 14, 40
_MAX_POINTS = 600


class Line(NamedTuple):
    """One series of a line plot."""

    label: str
    x: np.ndarray  # [N]
    y: np.ndarray  # [N]
    faint: bool = False
    """Drawn thin and pale, without a legend entry: raw values behind a smoothed line."""
    color: int | None = None
    """Index into the palette; by default its place among the lines that are not faint."""
    points: bool = False
    """Drawn as dots that nothing connects."""


class Bar(NamedTuple):
    label: str
    value: float


def smooth(y: np.ndarray, span: int) -> np.ndarray:
    """Centered moving mean of `y` [N] over `span` points, shorter at the ends; NaN is skipped."""
    y = np.asarray(y, np.float64)
    if span <= 1 or len(y) < 3:
        return y
    kernel = np.ones(min(span, len(y)) | 1)
    valid = np.isfinite(y)
    half = len(kernel) // 2
    total = np.convolve(np.where(valid, y, 0.0), kernel)[half : half + len(y)]
    count = np.convolve(valid.astype(np.float64), kernel)[half : half + len(y)]
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def ticks(low: float, high: float, num: int = 5) -> list[float]:
    """Round numbers that cover `[low, high]` in steps of 1, 2 or 5 times a power of ten."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return [0.0, 1.0]
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / max(1, num - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float) -> str:
    """A short form for axes and tables: 1,234,567 -> 1.23M."""
    if not math.isfinite(value):
        return "–"
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scale = 1e3 if suffix == "k" else limit
            return f"{value / scale:.3g}{suffix}"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:.3g}"


def percent(value: float) -> str:
    """A share for axes: 0.25 -> 25%."""
    return f"{value * 100:.3g}%"


class _Frame:
    """Axes of one plot: maps data to pixels and draws grid, ticks and labels."""

    def __init__(
        self,
        x_ticks: Sequence[float],
        y_ticks: Sequence[float],
        *,
        x_label: str,
        y_format: Callable[[float], str],
        x_format: Callable[[float], str] = number,
        x_limits: tuple[float, float] | None = None,
        width: int = WIDTH,
        height: int = HEIGHT,
    ) -> None:
        self.width, self.height = width, height
        self.x_low, self.x_high = x_limits or (x_ticks[0], x_ticks[-1])
        self.y_low, self.y_high = y_ticks[0], y_ticks[-1]
        self.parts: list[str] = []
        for value in y_ticks:
            y = self.y(value)
            self.parts.append(
                f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{width - _RIGHT}" y2="{y:.1f}" stroke="{GRID}"/>'
                + text(_LEFT - 7, y + 4, y_format(value), anchor="end")
            )
        for value in x_ticks:
            if self.x_low - 1e-9 <= value <= self.x_high * (1 + 1e-9) + 1e-9:
                self.parts.append(text(self.x(value), height - _BOTTOM + 17, x_format(value), anchor="middle"))
        self.parts.append(text((_LEFT + width - _RIGHT) / 2, height - 5, x_label, anchor="middle"))

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / ((self.x_high - self.x_low) or 1.0) * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return (
            self.height
            - _BOTTOM
            - (value - self.y_low) / ((self.y_high - self.y_low) or 1.0) * (self.height - _TOP - _BOTTOM)
        )

    def svg(self, title: str) -> str:
        return svg(self.width, self.height, "".join(self.parts), title)


def svg(width: float, height: float, body: str, title: str) -> str:
    """Wrap drawing commands into an element that screen readers can name."""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(title, quote=True)}" '
        f'preserveAspectRatio="xMidYMid meet">{body}</svg>'
    )


def text(x: float, y: float, content: str, *, anchor: str = "start", fill: str = MUTED, weight: str = "400") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}">'
        f"{html.escape(content)}</text>"
    )


def legend(labels: Sequence[str], colors: Sequence[str]) -> str:
    """An HTML legend, to stand above a plot."""
    items = "".join(
        f'<span><i style="background:{color}"></i>{html.escape(label)}</span>'
        for label, color in zip(labels, colors, strict=True)
    )
    return f'<div class="legend">{items}</div>'


def line_plot(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_format: Callable[[float], str] = number,
    y_limits: tuple[float, float] | None = None,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Lines over a shared x axis, with a legend when there is more than one.

    Args:
        lines: drawn in order; more points than the plot has pixels are thinned.
        title: what the plot shows, for screen readers.
        x_label: with its unit.
        y_format: how values are written on the y axis.
        y_limits: fixed range; by default that of the data.
        marks: horizontal dashed lines `(y, label)`, for bounds and goals.
    """
    # the solid lines set the range: one wild raw value must not flatten what it stands behind
    shown = [line for line in lines if not line.faint] or lines
    finite = [(line.x[ok], line.y[ok]) for line in shown for ok in [np.isfinite(line.x) & np.isfinite(line.y)]]
    xs = np.concatenate([x for x, _ in finite]) if finite else np.zeros(0)
    ys = np.concatenate([y for _, y in finite] + [np.array([m for m, _ in marks])]) if finite else np.zeros(0)
    if not xs.size:
        return empty_plot(title)
    x_limits = (float(xs.min()), float(xs.max()) if xs.max() > xs.min() else float(xs.min()) + 1.0)
    low, high = y_limits or (float(ys.min()), float(ys.max()))
    frame = _Frame(ticks(*x_limits, 6), ticks(low, high), x_label=x_label, y_format=y_format, x_limits=x_limits)
    for value, label in marks:
        y = frame.y(value)
        frame.parts.append(
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{frame.width - _RIGHT}" y2="{y:.1f}" stroke="{MUTED}" '
            f'stroke-dasharray="4 4"/>' + text(frame.width - _RIGHT - 4, y - 5, label, anchor="end")
        )
    place = 0
    names: list[tuple[str, str]] = []
    for line in lines:
        color = PALETTE[(place if line.color is None else line.color) % len(PALETTE)]
        style = f'stroke="{color}" ' + ('stroke-width="1" opacity="0.3"' if line.faint else 'stroke-width="2"')
        if line.points:
            frame.parts.extend(_dots(line, frame, color))
        else:
            frame.parts.extend(
                f'<polyline points="{points}" fill="none" stroke-linejoin="round" {style}/>'
                for points in _polylines(line, frame)
            )
        if not line.faint:
            names.append((line.label, color))
            place += 1
    head = legend([n for n, _ in names], [c for _, c in names]) if len(names) > 1 else ""
    return head + frame.svg(title)


def _dots(line: Line, frame: _Frame, color: str) -> list[str]:
    return [
        f'<circle cx="{frame.x(float(x)):.1f}" cy="{frame.y(float(y)):.1f}" r="4.5" fill="{color}" stroke="#fff">'
        f"<title>{html.escape(line.label)}: {number(float(y))}</title></circle>"
        for x, y in zip(line.x, line.y, strict=True)
        if math.isfinite(x) and math.isfinite(y)
    ]


def _polylines(line: Line, frame: _Frame) -> list[str]:
    stride = max(1, math.ceil(len(line.x) / _MAX_POINTS))
    pieces: list[list[str]] = [[]]
    for x, y in zip(line.x[::stride], line.y[::stride], strict=True):
        if math.isfinite(x) and math.isfinite(y):
            pieces[-1].append(f"{frame.x(float(x)):.1f},{frame.y(min(max(y, frame.y_low), frame.y_high)):.1f}")
        elif pieces[-1]:
            pieces.append([])
    return [" ".join(points if len(points) > 1 else points * 2) for points in pieces if points]


def histogram(
    values: Sequence[int],
    counts: Sequence[float],
    *,
    title: str,
    x_label: str,
    mark: tuple[float, str] | None = None,
) -> str:
    """Bars of shares over consecutive integers, for distributions of counts such as staleness.

    Args:
        values: [N] the integers.
        counts: [N] their weights; the bars show shares of the sum.
        title: what the plot shows, for screen readers.
        x_label: with its unit.
        mark: a vertical dashed line `(x, label)`, for a bound.
    """
    total = float(np.sum(counts))
    if total <= 0:
        return empty_plot(title)
    shares = [c / total for c in counts]
    low, high = min(values) - 0.6, max([*values, *([mark[0]] if mark else [])]) + 0.6
    every = max(1, round((high - low) / 14))
    x_ticks = [float(v) for v in range(math.ceil(low), math.floor(high) + 1) if v % every == 0]
    frame = _Frame(x_ticks, ticks(0, max(shares)), x_label=x_label, y_format=percent, x_limits=(low, high))
    half = 0.38
    for value, share, count in zip(values, shares, counts, strict=True):
        left, right, top = frame.x(value - half), frame.x(value + half), frame.y(share)
        frame.parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{frame.y(0) - top:.1f}" rx="2" '
            f'fill="{PALETTE[0]}"><title>{value}: {number(count)} ({percent(share)})</title></rect>'
        )
    if mark:
        x = frame.x(mark[0] + 0.5)  # right of the bar: the last allowed value
        frame.parts.append(
            f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{frame.height - _BOTTOM}" stroke="{PALETTE[1]}" '
            f'stroke-dasharray="4 4"/>' + text(x - 5, _TOP + 10, mark[1], anchor="end", fill=PALETTE[1])
        )
    return frame.svg(title)


def stacked_bar(bars: Sequence[Bar], *, title: str) -> str:
    """One horizontal bar of shares with a legend that names value and share; zero parts are left out."""
    total = sum(bar.value for bar in bars)
    if total <= 0:
        return empty_plot(title, height=60)
    width, height = 1140, 30
    x, parts, names, colors = 0.0, [], [], []
    for place, bar in enumerate(bars):
        if bar.value <= 0:
            continue
        span = bar.value / total * width
        color = PALETTE[place % len(PALETTE)]
        parts.append(
            f'<rect x="{x:.1f}" y="0" width="{max(span, 1.5):.1f}" height="{height}" fill="{color}">'
            f"<title>{html.escape(bar.label)}: {number(bar.value)} ({percent(bar.value / total)})</title></rect>"
        )
        if span > 70:
            parts.append(text(x + span / 2, 20, percent(bar.value / total), anchor="middle", fill="#fff", weight="600"))
        names.append(f"{bar.label} {number(bar.value)} ({percent(bar.value / total)})")
        colors.append(color)
        x += span
    return svg(width, height, "".join(parts), title) + legend(names, colors)


def stacked_areas(x: np.ndarray, parts: Mapping[str, np.ndarray], *, title: str, x_label: str, y_label: str) -> str:
    """Non-negative parts [N] on top of each other over `x` [N], for a breakdown of time."""
    x = np.asarray(x, np.float64)
    if len(x) < 2 or not parts:
        return empty_plot(title)
    known = np.isfinite(x) & np.all([np.isfinite(values) for values in parts.values()], axis=0)
    x, parts = x[known], {label: values[known] for label, values in parts.items()}
    if len(x) < 2:
        return empty_plot(title)
    stack = np.cumsum([np.maximum(values, 0.0) for values in parts.values()], axis=0)
    high = float(np.quantile(stack[-1], 0.98)) or 1.0
    frame = _Frame(
        ticks(float(x[0]), float(x[-1]), 6),
        ticks(0, high),
        x_label=x_label,
        y_format=lambda v: f"{number(v)}{y_label}",
        x_limits=(float(x[0]), float(x[-1])),
    )
    stride = max(1, math.ceil(len(x) / _MAX_POINTS))
    lower = np.zeros(len(x))
    colors = [PALETTE[i % len(PALETTE)] for i in range(len(stack))]
    for upper, color in zip(stack, colors, strict=True):
        upper = np.minimum(upper, frame.y_high)
        edge = [f"{frame.x(a):.1f},{frame.y(b):.1f}" for a, b in zip(x[::stride], upper[::stride], strict=True)]
        back = [f"{frame.x(a):.1f},{frame.y(b):.1f}" for a, b in zip(x[::stride], lower[::stride], strict=True)]
        frame.parts.append(f'<polygon points="{" ".join(edge + back[::-1])}" fill="{color}" opacity="0.85"/>')
        lower = upper
    return legend(list(parts), colors) + frame.svg(title)


def empty_plot(title: str, *, height: int = HEIGHT) -> str:
    """A frame that says there is nothing to draw, so that a hole in a report is not a mystery."""
    return svg(
        WIDTH,
        height,
        f'<rect x="0" y="0" width="{WIDTH}" height="{height}" fill="#f5f7fa" rx="6"/>'
        + text(WIDTH / 2, height / 2 + 4, "no data recorded", anchor="middle"),
        title,
    )

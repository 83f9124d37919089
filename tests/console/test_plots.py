from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from tunix_core.console import plots
from tunix_core.console.plots import Bar, Line

SVG = "{http://www.w3.org/2000/svg}"


def parse(fragment: str) -> ET.Element:
    """The svg of a fragment; raises when it is no XML."""
    return ET.fromstring(f'<div xmlns="http://www.w3.org/2000/svg">{fragment}</div>').find(f".//{SVG}svg")


def points(svg: ET.Element) -> list[list[tuple[float, float]]]:
    return [
        [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
        for line in svg.iter(f"{SVG}polyline")
    ]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.5, 1]),
        (0, 4, [0, 1, 2, 3, 4]),
        (-3, 7, [-5, 0, 5, 10]),
        (0.0, 0.0, [0.0, 0.5, 1.0]),
        (float("nan"), 1, [0, 1]),
    ],
)
def test_ticks_are_round_and_cover_the_range(low, high, expected):
    found = plots.ticks(low, high)
    assert found == pytest.approx(expected)


def test_ticks_cover_any_range():
    rng = np.random.default_rng(0)
    for _ in range(200):
        low = rng.normal() * 10.0 ** rng.integers(-6, 6)
        high = low + abs(rng.normal()) * 10.0 ** rng.integers(-6, 6)
        found = plots.ticks(low, high)
        slack = (high - low) * 1e-6 + 1e-12
        assert found[0] <= low + slack
        assert found[-1] >= high - slack
        assert len(found) <= 12


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0"), (1234, "1,234"), (12_345, "12.3k"), (1_236_518, "1.24M"), (0.12345, "0.123"), (float("nan"), "–")],
)
def test_numbers_are_short(value, expected):
    assert plots.number(value) == expected


def test_smoothing_is_a_centered_mean_and_skips_nan():
    y = np.array([0.0, 3.0, np.nan, 3.0, 6.0])
    assert plots.smooth(y, 3) == pytest.approx([1.5, 1.5, 3.0, 4.5, 4.5])
    assert plots.smooth(y[:2], 3) is not None
    constant = np.full(20, 0.25)
    assert plots.smooth(constant, 7) == pytest.approx(constant)


def test_lines_lie_where_their_values_are():
    svg = parse(plots.line_plot([Line("a", np.array([0.0, 1, 2]), np.array([0.0, 1, 0.5]))], title="t", x_label="x"))
    ((left, bottom), (middle, top), (right, half)) = points(svg)[0]
    assert middle == pytest.approx((left + right) / 2, abs=0.1)
    assert half == pytest.approx((bottom + top) / 2, abs=0.1)
    assert top < bottom, "y grows upwards"


def test_non_finite_points_break_a_line():
    y = np.array([0.0, 1.0, np.nan, 1.0, 0.0])
    svg = parse(plots.line_plot([Line("a", np.arange(5.0), y)], title="t", x_label="x"))
    assert [len(piece) for piece in points(svg)] == [2, 2]


def test_a_wild_raw_value_does_not_flatten_the_smoothed_line():
    x = np.arange(50.0)
    raw = np.ones(50)
    raw[25] = 1e6
    smooth = Line("smooth", x, np.linspace(0, 1, 50))
    svg = parse(plots.line_plot([Line("", x, raw, faint=True, color=0), smooth], title="t", x_label="x"))
    heights = [y for _, y in points(svg)[1]]
    assert max(heights) - min(heights) > plots.HEIGHT / 2
    assert all(0 <= y <= plots.HEIGHT for piece in points(svg) for _, y in piece), "clamped to the frame"


def test_long_series_are_thinned():
    x = np.arange(100_000.0)
    assert len(plots.line_plot([Line("a", x, x)], title="t", x_label="x")) < 30_000


def test_labels_are_escaped_and_titles_name_the_plot():
    fragment = plots.line_plot(
        [Line("<b>&", np.arange(2.0), np.arange(2.0)), Line("c", np.arange(2.0), np.arange(2.0))],
        title='a "title"',
        x_label="<x>",
    )
    assert parse(fragment).attrib["aria-label"] == 'a "title"'
    assert "&lt;b&gt;&amp;" in fragment
    assert "<x>" not in fragment


def test_histogram_shows_shares_and_the_bound():
    svg = parse(plots.histogram([0, 1, 2], [1, 3, 0], title="t", x_label="x", mark=(2, "bound")))
    heights = [float(rect.attrib["height"]) for rect in svg.iter(f"{SVG}rect")]
    assert heights[1] == pytest.approx(3 * heights[0], abs=0.3)
    assert heights[2] == 0
    dashed = [line for line in svg.iter(f"{SVG}line") if "stroke-dasharray" in line.attrib]
    last = list(svg.iter(f"{SVG}rect"))[-1].attrib
    assert float(dashed[0].attrib["x1"]) > float(last["x"]) + float(last["width"]), "the bound is still allowed"


def test_stacked_bar_gives_every_part_its_share():
    svg = parse(plots.stacked_bar([Bar("a", 75.0), Bar("none", 0.0), Bar("b", 25.0)], title="t"))
    widths = [float(rect.attrib["width"]) for rect in svg.iter(f"{SVG}rect")]
    assert widths == pytest.approx([855, 285])


def test_stacked_areas_leave_unknown_times_out():
    x = np.arange(4.0)
    known = np.array([np.nan, 1.0, 1.0, 1.0])
    svg = parse(plots.stacked_areas(x, {"a": known, "b": known}, title="t", x_label="x", y_label=" s"))
    areas = list(svg.iter(f"{SVG}polygon"))
    assert [len(area.attrib["points"].split()) for area in areas] == [6, 6]


@pytest.mark.parametrize(
    "fragment",
    [
        plots.line_plot([], title="t", x_label="x"),
        plots.line_plot([Line("a", np.zeros(0), np.zeros(0))], title="t", x_label="x"),
        plots.line_plot([Line("a", np.arange(3.0), np.full(3, np.nan))], title="t", x_label="x"),
        plots.histogram([0], [0], title="t", x_label="x"),
        plots.stacked_bar([Bar("a", 0.0)], title="t"),
        plots.stacked_areas(np.zeros(0), {"a": np.zeros(0)}, title="t", x_label="x", y_label=""),
        plots.stacked_areas(np.arange(3.0), {"a": np.full(3, np.nan)}, title="t", x_label="x", y_label=""),
    ],
)
def test_without_data_a_plot_says_so(fragment):
    assert "no data recorded" in fragment
    assert parse(fragment) is not None


def test_one_point_is_a_plot():
    assert points(parse(plots.line_plot([Line("a", np.ones(1), np.ones(1))], title="t", x_label="x")))

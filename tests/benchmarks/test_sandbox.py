"""The benchmark's own logic; nothing here is timed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.benchmarks import sandbox


def figures(pool: float, each: float) -> dict[str, Any]:
    ways = {"pool": pool, "bubblewrap and python per call": each, "monty": 0.5}
    times = {name: sandbox.Quantiles.of([value / 1000])._asdict() for name, value in ways.items()}
    return {"milliseconds": times, "calls_per_second": 100.0, "start_seconds": 1.0, "isolation": "bubblewrap"}


def test_quantiles_are_milliseconds() -> None:
    found = sandbox.Quantiles.of([value / 1000 for value in range(100, -1, -1)])
    assert tuple(found) == pytest.approx((50.0, 99.0, 0.0, 101))


@pytest.mark.parametrize(("pool", "met"), [(4.0, True), (6.0, False)])
def test_a_call_must_cost_half_of_a_sandbox_made_for_it(pool: float, met: bool) -> None:
    (goal,) = sandbox.goals(figures(pool, 10.0))
    assert goal.value == pytest.approx(pool / 10.0)
    assert goal.met == met


def test_the_table_compares_with_the_pool(capsys: pytest.CaptureFixture[str]) -> None:
    sandbox.report(figures(4.0, 10.0))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bubblewrap and python")]
    assert line.split()[-4:] == ["10.00", "10.00", "10.00", "2.50"]

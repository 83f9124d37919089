"""Whatever a sink does, rows are handed over at once, the others get theirs, and losses are counted."""

from __future__ import annotations

import math
import re
import threading
import time

from tests.sinks.support import ListSink
from tunix_core.sinks.base import MetricSink, SinkThread


def refuse() -> MetricSink:
    raise OSError("no route to the service")


def test_finite_figures_reach_every_sink_in_order() -> None:
    first, second, cleaned = ListSink(), ListSink(), []
    thread = SinkThread(
        {"a": lambda: first, "b": lambda: second}, log=print, cleanup=lambda: cleaned.append(first.closed)
    )
    thread.write(1, {"loss": 0.5, "state": "stepping", "gap": math.nan, "rate": math.inf, "override": True, "n": 3})
    for step in range(2, 50):
        thread.write(step, {"loss": 1 / step})
    thread.close()
    assert first.rows[0] == (1, {"loss": 0.5, "override": 1.0, "n": 3.0})
    assert [step for step, _ in first.rows] == list(range(1, 50))
    assert second.rows == first.rows
    assert (first.closed, second.closed) == (1, 1)
    assert cleaned == [1], "after the sinks were closed"


def test_a_sink_that_raises_is_dropped_and_the_others_go_on() -> None:
    lines: list[str] = []
    broken, sound = ListSink(fails_at=2), ListSink()
    thread = SinkThread({"never": refuse, "broken": lambda: broken, "sound": lambda: sound}, log=lines.append)
    for step in (1, 2, 3):
        thread.write(step, {"loss": 0.0})
    thread.close()
    assert [step for step, _ in broken.rows] == [1]
    assert [step for step, _ in sound.rows] == [1, 2, 3]
    assert thread.num_dropped_sinks == 2
    assert lines == [
        "metric sink never: dropped (OSError: no route to the service)",
        "metric sink broken: dropped (RuntimeError: the service is gone)",
    ]


def test_a_slow_sink_delays_no_one_and_costs_counted_rows() -> None:
    gate = threading.Event()
    slow = ListSink(gate=gate)
    lines: list[str] = []
    thread = SinkThread({"slow": lambda: slow}, log=lines.append, capacity_rows=4)
    started = time.monotonic()
    for step in range(100):
        thread.write(step, {"loss": 0.0})
    thread.close(timeout_seconds=0.05)
    thread.close(timeout_seconds=1000.0)
    assert time.monotonic() - started < 1.0, "closed again, it does not wait again"
    assert thread.num_dropped_rows == 99, "all but the one in hand"
    assert re.fullmatch(r"metric sinks: [34] rows not written after 0.05 s", *lines), "a fifth may have found it full"
    gate.set()
    thread._worker.stop()
    assert [step for step, _ in slow.rows] == [0]


def test_without_sinks_there_is_no_thread() -> None:
    before = threading.active_count()
    thread = SinkThread({}, log=print)
    thread.write(1, {"loss": 0.0})
    thread.close()
    assert threading.active_count() == before

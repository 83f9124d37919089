from __future__ import annotations

import io

import pytest
from rich.console import Console

from tests.support.run_factory import make_run
from tunix_core.console.live import RunView, render, sparkline
from tunix_core.errors import StoreError
from tunix_core.storage.control import write_heartbeat
from tunix_core.storage.store import open_store


def shown(view: RunView, **changes) -> str:
    console = Console(file=io.StringIO(), width=140)
    arguments = {
        "title": "lookup, seed 0",
        "tasks": {"learner": "deferred", "finalize": None},
        "address": "http://here",
    }
    console.print(render(view, **{**arguments, **changes}))
    return console.file.getvalue()


@pytest.fixture
def view(tmp_path):
    run = make_run(open_store(str(tmp_path)))
    view = RunView()
    view.refresh(run.store)
    return view


def test_the_view_shows_what_the_heartbeats_say(view):
    text = shown(view)
    for part in ("4 of 4", "actor-0-0", "actor-1-0", "75.0%", "learner deferred", "finalize pending", "http://here"):
        assert part in text
    assert f"{view.learner['ledger']['surplus']:,}" in text
    assert "10.0% of 5 GFLOP/s" in text
    assert "2.00 s = device 1.50 + wait for data 0.25 + other 0.12 + pack 0.06 + transfer 0.06" in text
    assert "quarantined" not in text, "classes without tokens stay out"


def test_the_plain_line_has_the_same_figures(view):
    line = view.line()
    assert "step 4/4" in line
    assert "actors 100 tok/s" in line
    assert "\n" not in line


def test_success_is_kept_by_clock(tmp_path):
    store = open_store(str(tmp_path))
    view = RunView()
    for clock, success in ((1, 0.2), (2, 0.4), (2, 0.5)):
        write_heartbeat(store, "learner", {"clock": clock, "success_rate": success})
        view.refresh(store)
    assert list(view.success.values()) == [0.2, 0.5]


def test_before_the_learner_there_is_a_word_for_it(tmp_path):
    store = open_store(str(tmp_path))
    view = RunView()
    view.refresh(store)
    assert "not started" in view.line()
    write_heartbeat(store, "warm_start", {"num_steps": 20, "success": 0.1})
    view.refresh(store)
    assert "warm start: step 20" in view.line()
    assert "warm start" in shown(view)


def test_a_store_that_does_not_answer_leaves_the_last_view(view):
    class Silent:
        parallel_requests = 1

        def list_after(self, prefix, _after=""):
            raise StoreError(f"{prefix}: no answer")

    before = view.line()
    view.refresh(Silent())
    assert view.line() == before


def test_the_sparkline_clamps_and_keeps_the_newest():
    assert sparkline([-1.0, 0.0, 0.5, 1.0, 2.0]) == "▁▁▅██"
    assert sparkline([0.0] * 10 + [1.0], width=3) == "▁▁█"

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.evaluation.test_summary import summarize
from tests.support.run_factory import MadeRun, make_run
from tunix_core.console import report
from tunix_core.evaluation.audit import audit_run
from tunix_core.evaluation.held_out import Outcome, read_evaluations, write_evaluation
from tunix_core.storage.metrics_files import read_metrics
from tunix_core.storage.store import open_store

VOID = {"meta", "br", "img", "line", "rect", "circle", "polyline", "polygon"}


class Balanced(HTMLParser):
    """Fails on tags that do not close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []

    def handle_starttag(self, tag, _attrs):
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.stack, f"</{tag}> closes nothing"
            assert self.stack.pop() == tag


@pytest.fixture
def run(tmp_path) -> MadeRun:
    return make_run(open_store(str(tmp_path)), num_steps=12)


def render(run: MadeRun) -> str:
    summary = summarize(run)
    evaluations = read_evaluations(run.store)
    return report.render(
        summary,
        run.config,
        read_metrics(run.store, "learner"),
        audit_run(run.store, max_staleness=4),
        evaluations[0],
        evaluations[12],
        {"actor-0-0": read_metrics(run.store, "actor-0-0")},
    )


def test_the_page_stands_alone_and_is_well_formed(run):
    page = render(run)
    parser = Balanced()
    parser.feed(page)
    assert parser.stack == []
    assert not re.search(r"""(?:src|href)=|url\(|@import|<script""", page), "nothing is fetched"
    assert "nan" not in re.sub(r"[a-z]*nan[a-z]+", "", page.lower())


def test_the_page_shows_the_figures_of_the_summary(run):
    page = render(run)
    assert "20.0% → 100.0%" in page
    assert "held-out success at least 80%" in page
    assert f"{run.ledger['read']:,}".replace(",", "\u202f") in page
    assert "Computed from step records and shards: 0 above the bound of 4." in page
    assert "learning_rate" in page


def test_transcripts_pair_the_same_tasks_and_are_escaped(run):
    for version, said in ((0, "<script>alert(1)</script>"), (12, "= 483")):
        outcomes = [
            Outcome(
                task_seed=5,
                reward=float(version > 0),
                success=version > 0,
                num_turns=1,
                num_tokens=9,
                finish_reason="completed",
                messages=[{"role": "prompt", "content": "find c"}, {"role": "policy", "content": said}],
            )
        ]
        write_evaluation(
            run.store, version, outcomes, digest="d9", seed=0, policy_manifest="m", created_at=float(1e12 + version)
        )
    evaluations = read_evaluations(run.store)
    html = report._dialogues(evaluations[0], evaluations[12])
    assert "&lt;script&gt;" in html
    assert "<script>" not in html
    assert html.index("not solved") < html.index(">solved")


def test_step_times_are_the_recorded_ones_of_first_use_steps():
    steps = {
        "clock": np.arange(1.0, 6.0),
        "device_seconds": np.array([1.0, 1.5, 1.5, 1.5, 1.5]),
        "wait_for_data_seconds": np.array([9.0, 0.25, np.nan, 0.0, 1.0]),
        "replayed": np.array([0.0, 0.0, 1.0, 0.0, 0.0]),
        **{
            name: np.full(5, 0.125)
            for name in ("throttled_seconds", "pack_seconds", "transfer_seconds", "other_seconds")
        },
    }
    times = report.step_times(steps)
    assert np.isnan(times["device"]).tolist() == [True, False, True, True, False], "first, replayed, after a restart"
    assert sum(times.values())[[1, 4]] == pytest.approx([2.25, 3.0])
    assert list(times) == ["device", "waiting for data", "throttled", "packing", "transfer", "other"]


def test_the_page_shows_step_times_utilisation_and_the_gap(run):
    page = render(run)
    for part in ("waiting for data", "packing", "transfer", "throttled", "500 ms to prepare", "a share of 5 GFLOP/s"):
        assert part in page
    assert page.count("Model FLOPs utilisation") > 1
    assert "Sampler against learner, at equal version" in page
    utilization = report._utilization(report.step_rows(read_metrics(run.store, "learner")), np.full(12, 2.0))[1]
    assert "no data recorded" not in utilization


@pytest.mark.parametrize(
    ("device", "wait", "cause"),
    [(0.9, 0.05, "The device bounds it"), (0.6, 0.35, "The actors bound it"), (0.6, 0.05, "The host bounds it")],
)
def test_what_bounds_a_run_follows_from_its_times(device, wait, cause):
    steps = {
        "clock": np.arange(20.0),
        "device_seconds": np.full(20, device),
        "wait_for_data_seconds": np.full(20, wait / 2),
        "throttled_seconds": np.full(20, wait / 2),
        **{f"{part}_seconds": np.full(20, (1 - device - wait) / 3) for part in ("pack", "transfer", "other")},
        "replayed": np.zeros(20),
    }
    summary = {"tokens_per_second": 100.0, "tokens_per_second_vs_full_buffer": 0.7}
    sentence = report.bound_sentence(steps, summary)
    assert sentence.startswith(cause)
    assert f"{device:.0%} went into updates" in sentence
    assert "0.70 of its rate" in sentence


def test_a_run_without_steps_has_a_report_all_the_same():
    assert report.bound_sentence({}, {}) == "Too few steps to tell."
    assert report.step_times({})["other"].size == 0
    panels = [*report._stability({}), *report._machinery({}, {})]
    assert all("no data recorded" in svg for _, svg, _ in panels)


def test_a_step_that_was_executed_again_counts_once():
    learner = {
        "clock": np.array([1, 2, 2, 3, 3]),
        "loss": np.array([0.1, 0.2, 0.25, 0.3, np.nan]),
        "incarnation": np.array(["a"] * 5, object),
    }
    steps = report.step_rows(learner)
    assert steps["clock"].tolist() == [1, 2, 3]
    assert steps["loss"].tolist() == [0.1, 0.25, 0.3]

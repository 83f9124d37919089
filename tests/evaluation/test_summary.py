from __future__ import annotations

import json

import pytest

from tests.evaluation.test_held_out import write
from tests.support.run_factory import make_run
from tunix_core.evaluation.audit import audit_run
from tunix_core.evaluation.summary import build_summary, goals
from tunix_core.storage.control import write_heartbeat
from tunix_core.storage.run_directory import read_run
from tunix_core.storage.step_records import read_steps, write_step
from tunix_core.storage.store import open_store
from tunix_core.types import LEDGER_CLASSES

REQUIRED = {
    *("success_before", "success_after", "wall_seconds", "num_actor_processes", "num_policy_versions"),
    *("max_staleness_seen", "staleness_violations", "ledger", "compilations_after_warmup", "learner_busy_fraction"),
    *("tokens_generated", "seed", "tokens_per_second_vs_full_buffer"),
}


@pytest.fixture
def run(tmp_path):
    return make_run(open_store(str(tmp_path)), num_steps=12)


def summarize(run, *, full_buffer: float = 125.0):
    config, extra = read_run(run.store)
    return build_summary(
        run.store,
        config,
        extra,
        audit_run(run.store, max_staleness=config.staleness.max_staleness),
        before=write(run.store, 0, [True, False, False, False, False]),
        after=write(run.store, 12, [True, True, True, True, True]),
        full_buffer_tokens_per_second=full_buffer,
    )


def test_the_summary_of_a_sound_run(run):
    summary = summarize(run)
    assert set(summary) >= REQUIRED
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary, "plain JSON"
    assert set(summary["success_before"]) == {"value", "low", "high", "n"}
    assert set(summary["ledger"]) == {"read", *LEDGER_CLASSES}
    assert summary["ledger"] == run.ledger
    assert summary["max_staleness_seen"] == 1
    assert summary["num_policy_versions"] == 12
    assert summary["num_actor_processes"] == 2
    assert summary["tokens_per_second_vs_full_buffer"] == pytest.approx(0.8)
    assert [text for text, met in goals(summary) if not met] == []


def test_each_goal_can_be_missed(run):
    summary = summarize(run)
    before = summary["success_before"]
    broken = {
        "success at least": {"success_after": {**before, "value": 0.79}},
        "gained": {"success_before": {**before, "value": 0.7}},
        "actor processes": {"num_actor_processes": 1},
        "versions": {"num_policy_versions": 9},
        "staleness bound": {"staleness_violations": 1},
        "consumed twice": {"consumed_twice": 1},
        "stale": {"stale_fraction": 0.1},
        "ledger": {"ledger_faults": ["off by one"]},
        "compilation": {"compilations_after_warmup": 1},
        "full-buffer": {"tokens_per_second_vs_full_buffer": 0.59},
    }
    for word, change in broken.items():
        missed = [text for text, met in goals({**summary, **change}) if not met]
        assert len(missed) == 1, (word, missed)
        assert word in missed[0]


def test_what_the_step_records_say_beats_what_the_learner_counted(run):
    first = read_steps(run.store, 0)[0]
    write_step(run.store, 13, {**first, "clock": 13})
    summary = summarize(run)
    assert summary["staleness_violations"] == 8
    assert summary["max_staleness_seen"] == 12
    assert summary["consumed_twice"] == 8
    assert summary["ledger_faults"]


def test_an_actor_that_ended_before_its_first_metrics_counts_as_a_process(run):
    write_heartbeat(run.store, "actor-1-1", {"version": 0})
    summary = summarize(run)
    assert summary["num_actor_processes"] == 3
    assert summary["compilations_after_warmup"] == 0

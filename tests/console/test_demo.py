from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from tests.evaluation.test_summary import summarize
from tests.support.run_factory import make_run
from tunix_core.config_loading import load_recipe
from tunix_core.console import demo
from tunix_core.errors import ConfigError
from tunix_core.storage.store import open_store


def options(tmp_path: Path, *arguments: str) -> demo.DemoOptions:
    return demo._options(["--home", str(tmp_path / "home"), "--reports", str(tmp_path / "reports"), *arguments])


def test_the_run_keeps_learner_and_others_apart(tmp_path):
    learner, others = demo.split_cpus()
    assert not set(learner) & set(others)
    assert set(learner) | set(others) <= os.sched_getaffinity(0)
    overrides = demo.run_overrides(options(tmp_path, "--set", "learner.num_steps=7"))
    config = load_recipe("lookup", overrides)
    assert config.launcher.learner_cpus == learner
    assert config.learner.num_steps == 7
    pinned = demo.run_overrides(options(tmp_path, "--set", "launcher.learner_cpus=[0]"))
    assert pinned["launcher.learner_cpus"] == [0], "what a person sets stands"


def test_a_mistake_in_the_recipe_is_said_before_anything_starts(tmp_path):
    made = demo.Demo(options(tmp_path, "--recipe", "nope"), Console(file=io.StringIO()))
    with pytest.raises(ConfigError, match="recipe: received 'nope'"):
        made.run()
    assert not (tmp_path / "home").exists()


class ScriptedClient:
    """What `_conclude` asks of Airflow, from a script."""

    def __init__(self, states: dict[tuple[str, int], str]) -> None:
        self.states = states

    def task_states(self, dag_id, run_id):
        assert (dag_id, run_id) == (demo.DAG_ID, "run")
        return self.states

    def logs(self, dag_id, run_id, task, *, map_index):
        assert (dag_id, run_id) == (demo.DAG_ID, "run")
        return [f"{task} {map_index}: the last words [of it]"]


def conclude(tmp_path, state: str, summary, states=None) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=120)
    made = demo.Demo(options(tmp_path), console)
    code = made._conclude(ScriptedClient(states or {}), "run", state, summary)
    return code, console.file.getvalue()


def test_the_exit_code_says_whether_the_goals_are_met(tmp_path):
    run = make_run(open_store(str(tmp_path / "run")), num_steps=12)
    summary = summarize(run)
    code, text = conclude(tmp_path, "success", summary)
    assert code == 0
    assert "20.0%" in text
    assert "goal missed" not in text
    code, text = conclude(tmp_path, "success", {**summary, "staleness_violations": 2})
    assert code == demo.EXIT_GOALS_MISSED
    assert "goal missed: no gradient above the staleness bound" in text


def test_a_failed_run_fails_whatever_its_summary_says(tmp_path):
    summary = summarize(make_run(open_store(str(tmp_path / "run")), num_steps=12))
    code, text = conclude(tmp_path, "failed", summary)
    assert code not in (0, demo.EXIT_GOALS_MISSED)
    assert "the run ended as failed" in text


def test_a_run_that_failed_shows_the_failed_task_and_its_last_words(tmp_path):
    code, text = conclude(tmp_path, "failed", None, {("learner", -1): "failed", ("actors", 0): "success"})
    assert code not in (0, demo.EXIT_GOALS_MISSED)
    assert "the run ended as failed" in text
    assert "learner -1: the last words [of it]" in text


def test_summary_and_report_are_copied(tmp_path):
    made = demo.Demo(options(tmp_path), Console(file=io.StringIO()))
    made._run_uri = str(tmp_path / "run")
    store = open_store(made._run_uri)
    assert made._collect() is None, "a run that failed early has none"
    assert not (tmp_path / "reports").exists(), "a report of an earlier run would be mistaken for this one's"
    store.put("reports/summary.json", json.dumps({"seed": 3}).encode())
    store.put("reports/report.html", b"<html>")
    assert made._collect() == {"seed": 3}
    assert (tmp_path / "reports" / "report.html").read_bytes() == b"<html>"

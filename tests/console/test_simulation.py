import json

import numpy as np
import pytest

from tests.support.trajectories import make_trajectory
from tunix_core.config_loading import load_recipe
from tunix_core.console import cli
from tunix_core.console.calibration import measure
from tunix_core.console.simulation import distance
from tunix_core.errors import ConfigError
from tunix_core.metrics import MetricRecorder
from tunix_core.storage.metrics_files import MetricFiles
from tunix_core.storage.run_directory import create_run
from tunix_core.storage.store import open_store
from tunix_core.storage.trajectory_writer import TrajectoryWriter

SMALL = ["--set", "num_actors=4", "--set", "groups_per_batch=12", "--set", "step_seconds=5", "--hours", "0.05"]


def simulate(*arguments: str) -> int:
    return cli.main(["simulate", *arguments])


def test_figures_plots_and_the_published_rules(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, plots = tmp_path / "figures.json", tmp_path / "plots.html"
    assert simulate(*SMALL, "--compare", "--json", str(figures), "--html", str(plots)) == 0
    shown = capsys.readouterr().out
    found = json.loads(figures.read_text())
    assert found["setting"]["num_actors"] == 4
    assert found["setting"]["duration_seconds"] == 180.0
    assert next(iter(found["outcomes"])) == "headroom"
    assert len(found["outcomes"]) == 4
    assert found["outcomes"]["headroom"]["steps"] > 10
    assert found["outcomes"]["synchronous"]["steps"] < found["outcomes"]["headroom"]["steps"]
    assert str(found["outcomes"]["headroom"]["steps"]) in shown
    page = plots.read_text()
    assert page.count("<svg") == 8
    assert "4 actors, 12 groups per step of 5 s" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_recipe_gives_the_setting(tmp_path) -> None:
    figures = tmp_path / "figures.json"
    assert simulate("--recipe", "lookup", "--hours", "0.02", "--json", str(figures)) == 0
    setting, config = json.loads(figures.read_text())["setting"], load_recipe("lookup")
    assert setting["groups_per_batch"] == config.learner.groups_per_batch
    assert setting["max_staleness"] == config.staleness.max_staleness
    assert setting["num_actors"] == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--set", "num_actors=0"], "num_actors"),
        (["--set", "colour=red"], "colour"),
        (["--set", "num_actors"], "override"),
        (["--set", "faults.restart_seconds=-1"], "faults.restart_seconds"),
        (["--hours", "0"], "duration_seconds"),
        (["--recipe", "nothing"], "recipe"),
        ([*SMALL, "--json", "/nowhere/at/all.json"], "--json"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(*arguments) != 0
    assert named in capsys.readouterr().err


def test_a_run_is_measured(tmp_path) -> None:
    """Two groups at once, 3 and 5 s long; steps of 2 s of which weights are published 0.5 s later."""
    store = open_store(str(tmp_path / "run"))
    config = load_recipe("lookup")
    create_run(store, config, run_id="r")
    with pytest.raises(ConfigError, match="at least 5 steps"):
        measure(store, config)
    now = 0.0
    learner, sync = (MetricRecorder(name, clock=lambda: now) for name in ("learner", "sync_weights"))
    for step in range(1, 7):
        now = 90.0 + 10 * step
        ages = {f"staleness_{age}": (8 if age == step % 2 else 0) for age in range(5)}
        for _ in range(1 + (step == 4)):  # a step may have been executed again after a restart
            learner.record(clock=step, loss=0.1, device_seconds=2.0, ledger_read=1000, ledger_stale=50, **ages)
        now += 0.5
        sync.record(version=step, accepted=1)
    for recorder in (learner, sync):
        MetricFiles(store, recorder, incarnation="i").flush()
    writer = TrajectoryWriter(store, actor_id="a", incarnation="0001")
    rows = [
        make_trajectory(
            2 * group + member,
            group_size=2,
            incarnation="0001",
            created_at=end,
            generation_seconds=seconds - 1,
            environment_seconds=1.0,
        )
        for group, end, seconds in ((0, 103.0, 3.0), (1, 106.0, 5.0))
        for member in range(2)
    ]
    writer.write(rows)
    found = measure(store, config)
    assert found.num_steps == 6
    assert (found.step_seconds, found.publish_seconds) == (2.0, 0.5 + config.actor.poll_seconds / 2)
    assert found.duration_seconds == 50.0
    assert found.busy_fraction == pytest.approx(12 / 50)
    assert found.discarded_token_fraction == 0.05
    assert found.staleness == {0: 24, 1: 24}
    assert found.groups_per_actor == 2
    seconds, _ = found.draw(np.random.default_rng(0), 50)
    assert set(seconds.tolist()) == {3.0, 5.0}


def test_the_distance_of_histograms() -> None:
    assert distance({0: 10, 1: 10}, {0: 5, 1: 5}) == 0
    assert distance({0: 10}, {1: 3}) == 1
    assert distance({0: 3, 1: 1}, {0: 1, 1: 1}) == pytest.approx(0.25)

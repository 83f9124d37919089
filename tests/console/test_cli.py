from __future__ import annotations

import pytest

from tests.evaluation.test_held_out import write
from tests.support.run_factory import HOUR, START, make_run, make_trajectory
from tunix_core import paths
from tunix_core.console.cli import main
from tunix_core.errors import EXIT_CONFIG, EXIT_STORE
from tunix_core.storage.control import read_profile_request
from tunix_core.storage.store import open_store
from tunix_core.storage.trajectory_writer import TrajectoryWriter


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    return make_run(open_store(str(tmp_path)))


def test_status(run, capsys):
    write(run.store, 4, [True, True, False, True])
    assert main(["status", "--run", run.store.uri]) == 0
    text = capsys.readouterr().out
    for part in ("recipe lookup", "ended: completed (by learner)", "policy version: 4", "step 4 of 4", "75.0%"):
        assert part in text
    assert f"{run.ledger['consumed']:,}" in text
    assert "4242" in text, "the learner's pid"


def test_profile_asks_for_a_trace_once(run, capsys):
    arguments = ["profile", "--run", run.store.uri, "--steps", "2"]
    assert main([*arguments, "--id", "mine"]) == EXIT_CONFIG, "the run is over"
    assert "a run that goes on" in capsys.readouterr().err
    run.store.delete(paths.STOP)
    assert main([*arguments, "--id", "mine"]) == 0
    assert f"--logdir {run.store.uri.removeprefix('file://')}/profiles/mine" in capsys.readouterr().out
    first = read_profile_request(run.store)
    assert (first.id, first.steps) == ("mine", 2)
    assert main([*arguments, "--id", "mine"]) == 0
    assert read_profile_request(run.store) == first
    assert main(arguments) == 0
    assert read_profile_request(run.store).id != "mine", "without a name, the time"
    assert main(["profile", "--run", run.store.uri, "--steps", "1000"]) == EXIT_CONFIG
    assert "steps: received 1000, accepted 1 to 100" in capsys.readouterr().err


def test_trajectories_newest_first(run, capsys):
    assert main(["trajectories", "--run", run.store.uri, "--limit", "3"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "actor_" in line]
    assert len(lines) == 3
    assert "actor_1_0-0005" in lines[0]


def test_trajectories_by_outcome(run, capsys):
    assert main(["trajectories", "--run", run.store.uri, "--failed", "--limit", "99"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "actor_" in line]
    assert len(lines) == 2 * (3 + 2 + 1), "of 4 members the first s are solved in step s"


def test_broken_shards_and_rows_do_not_end_the_list(run, capsys):
    run.store.put_if_absent(f"{paths.TRAJECTORIES}{HOUR}/actor_9_9-inc9-00000000.parquet", b"PAR1")
    names = {"actor_id": "actor_8_8", "incarnation": "inc8"}
    faulty = make_trajectory("faulty", group_id="g", version=0, solved=True, temperature=-1.0, **names)
    TrajectoryWriter(run.store, **names, clock=lambda: START).write([faulty])
    assert main(["trajectories", "--run", run.store.uri, "--limit", "2"]) == 0
    captured = capsys.readouterr()
    assert "actor_1_0-0005" in captured.out
    assert "actor_9_9-inc9-00000000.parquet" in captured.err
    assert "actor_8_8-inc8-00000000.parquet row 0: temperature" in captured.err


def test_one_transcript(run, capsys):
    assert main(["trajectories", "--run", run.store.uri, "actor_0_0-0002-1"]) == 0
    text = capsys.readouterr().out
    for part in ("prompt", "find c", "get c", "= 483", "version 0", "mean logprob -0.500", "reward 1"):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["trajectories", "no-such-id"], EXIT_CONFIG, "trajectory: received 'no-such-id'"),
        (["trajectories", "--limit", "0"], EXIT_CONFIG, "--limit: received 0"),
    ],
)
def test_mistakes_are_explained(run, capsys, arguments, code, message):
    command, *rest = arguments
    assert main([command, "--run", run.store.uri, *rest]) == code
    assert message in capsys.readouterr().err


def test_a_folder_without_a_run(tmp_path, capsys):
    assert main(["status", "--run", str(tmp_path / "nothing")]) == EXIT_STORE
    assert "run.json" in capsys.readouterr().err
    assert main(["status", "--run", "s3://bucket/run"]) == EXIT_CONFIG

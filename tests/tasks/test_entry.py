import os
import signal
from pathlib import Path

import pytest

from tasks import checkpoint, run_learner, sync_weights
from tasks.entry import Task, run_task
from tunix_core.config_loading import load_recipe
from tunix_core.errors import ConfigError, Diverged, Fenced, Interrupted
from tunix_core.storage.control import request_stop
from tunix_core.storage.run_directory import create_run
from tunix_core.storage.store import open_store


@pytest.fixture(autouse=True)
def _handlers():
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture
def run_uri(tmp_path: Path) -> str:
    create_run(open_store(str(tmp_path)), load_recipe("lookup"), run_id="r")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (ConfigError("f", 1, "2", "Mend."), 64),
        (Fenced("x"), 70),
        (Interrupted("x"), 75),
        (Diverged("x"), 76),
        (RuntimeError("x"), 1),
    ],
)
def test_outcomes_map_to_exit_codes(run_uri: str, error: Exception | None, code: int, capsys) -> None:
    def body(task: Task) -> None:
        assert task.config.recipe == "lookup"
        assert (task.process, task.attempt) == ("learner", 3)
        if error is not None:
            raise error

    assert run_task("run_learner", body, ["--run", run_uri, "--process", "learner", "--attempt", "3"]) == code
    shown = capsys.readouterr().err
    assert ("Traceback" in shown) == (code == 1)
    assert error is None or str(error) in shown


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_flag_and_nothing_else(run_uri: str, signum: int) -> None:
    def body(task: Task) -> None:
        os.kill(os.getpid(), signum)
        assert task.interrupted.wait(5)

    assert run_task("sync_weights", body, ["--run", run_uri]) == 0


def test_a_missing_run_is_worth_another_attempt(tmp_path: Path, capsys) -> None:
    assert run_task("sync_weights", lambda _: None, ["--run", str(tmp_path / "none")]) == 74
    assert "run.json" in capsys.readouterr().err


@pytest.mark.parametrize("main", [run_learner.main, sync_weights.main, checkpoint.main])
@pytest.mark.parametrize("failed", [False, True])
def test_after_the_end_of_the_run_a_process_exits_with_success(run_uri: str, main, failed: bool) -> None:
    request_stop(open_store(run_uri), reason="over", source="learner", failed=failed)
    assert main(["--run", run_uri]) == 0

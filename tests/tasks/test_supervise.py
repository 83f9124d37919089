"""The supervisor with real processes on a local store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.supervise import parse
from tunix_core.errors import EXIT_CONFIG, EXIT_DIVERGED, EXIT_FENCED, EXIT_INTERRUPTED, ConfigError, ObjectMissing
from tunix_core.processes import identify, pid_start, wait_until
from tunix_core.storage import control, process_table
from tunix_core.storage.store import ObjectStore, open_store, read_json

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return open_store(str(tmp_path / "run"))


@pytest.fixture
def start(store: ObjectStore) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """start(script, *options) -> the supervisor of process `worker`."""
    started: list[subprocess.Popen[bytes]] = []

    def launch(script: dict[str, Any], *options: str, key: str = "key") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.support.scripted.scripted_component", "--run", store.uri]
        supervise = [sys.executable, "-m", "tasks.supervise", "--run", store.uri, "--process", "worker"]
        supervise += ["--submission-key", key]
        supervisor = subprocess.Popen(
            [*supervise, *options, "--", *command, "--script", json.dumps(script)],
            cwd=ROOT,
            start_new_session=True,
            stderr=subprocess.PIPE,
        )
        started.append(supervisor)
        return supervisor

    yield launch
    for supervisor in started:
        if supervisor.poll() is None:
            supervisor.kill()
        supervisor.communicate(timeout=120)


def life(store: ObjectStore, name: str = "worker", number: int = 1) -> dict[str, Any]:
    """What the child's life of that number wrote at its start."""

    def there() -> bool:
        try:
            return bool(read_json(store, f"scripted/{name}-lives.json")["lives"] >= number)
        except ObjectMissing:
            return False

    assert wait_until(there, 120)
    return read_json(store, f"scripted/{name}-lives.json")


def record(store: ObjectStore) -> control.ProcessRecord:
    found = control.read_process(store, "worker")
    assert found is not None
    return found[0]


def test_a_finished_process_leaves_its_exit_code_and_its_log(store, start) -> None:
    assert start({"seconds": 0.3}).wait(20) == 0
    ended = record(store)
    assert (ended.state, ended.exit_code, ended.attempt) == ("exited", 0, 1)
    log = store.get("logs/worker.log").decode()
    assert "worker attempt 1 life 1 from step 0" in log
    assert "done" in log


def test_a_fatal_exit_code_is_published_and_never_restarted(store, start) -> None:
    assert start({"crash_at": {"1": [2, EXIT_DIVERGED]}}, "--restarts", "5").wait(20) == EXIT_DIVERGED
    ended = record(store)
    assert ended.exit_code == EXIT_DIVERGED
    assert "crashing on purpose" in ended.reason
    assert life(store)["lives"] == 1


def test_a_killed_supervisor_leaves_no_child(store, start) -> None:
    supervisor = start({"waits": True, "ignores": ["SIGTERM"]})
    child = life(store)["pid"]
    supervisor.kill()
    supervisor.wait()
    assert wait_until(lambda: pid_start(child) is None, 120)
    assert process_table.ProcessObserver(store, "worker").status().state == "lost"


def test_a_killed_child_is_restarted_within_its_budget(store, start) -> None:
    """Lives 1 to 3 die on their first step, without progress; a budget of 2 ends with the third."""
    crash = {"1": 1, "2": 2, "3": 3, "4": 4}
    assert start({"crash_at": crash}, "--restarts", "2").wait(30) == 128 + signal.SIGKILL
    assert life(store)["lives"] == 3
    assert record(store).exit_code == -signal.SIGKILL


def test_progress_refills_the_budget(store, start) -> None:
    """The first death uses the budget up; the second life works for seconds and earns it back."""
    crash = {"1": 1, "2": 55}
    assert start({"seconds": 6, "crash_at": crash}, "--restarts", "1").wait(60) == 0
    assert life(store)["lives"] == 3


def test_the_stop_object_ends_a_process_by_itself(store, start) -> None:
    supervisor = start({"waits": True})
    life(store)
    control.request_stop(store, reason="completed", source="test", failed=False)
    assert supervisor.wait(20) == 0


def test_a_process_deaf_to_the_stop_object_is_killed_after_the_grace(store, start) -> None:
    supervisor = start({"waits": True, "ignores_stop": True}, "--grace-seconds", "0.5")
    child = life(store)["pid"]
    control.request_stop(store, reason="test", source="test", failed=True)
    assert supervisor.wait(30) != 0
    assert pid_start(child) is None


def test_work_after_the_end_ignores_the_stop_object(store, start) -> None:
    control.request_stop(store, reason="completed", source="test", failed=False)
    assert start({"seconds": 0.3, "ignores_stop": True}, "--ignore-stop").wait(20) == 0
    assert store.get("logs/worker.log").decode().count("done") == 1


def test_sigterm_is_passed_on(store, start) -> None:
    supervisor = start({"waits": True}, "--restarts", "3")
    child = life(store)["pid"]
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(20) == EXIT_INTERRUPTED
    assert pid_start(child) is None
    assert record(store).exit_code == EXIT_INTERRUPTED


def test_replicas_have_names_logs_and_one_fate(store, start) -> None:
    supervisor = start({"waits": True}, "--replicas", "2")
    pids = [life(store, f"worker-{i}")["pid"] for i in range(2)]
    os.kill(pids[0], signal.SIGKILL)  # no restarts: the pool ends with it
    assert supervisor.wait(20) == 128 + signal.SIGKILL
    assert pid_start(pids[1]) is None
    assert b"worker-1 attempt 1" in store.get("logs/worker-1.log")


def test_a_superseded_attempt_kills_its_children(store, start) -> None:
    supervisor = start({"waits": True, "ignores": ["SIGTERM"]})
    child = life(store)["pid"]
    control.update_process(store, "worker", lambda r: r and r.__class__(**{**vars(r), "attempt": r.attempt + 1}))
    assert supervisor.wait(20) == EXIT_FENCED
    assert pid_start(child) is None
    assert record(store).state == "running"  # the newer attempt's record stays as it was


def test_the_same_submission_is_not_run_twice(store, start) -> None:
    first = start({"waits": True})
    life(store)
    second = start({"waits": True})
    assert second.wait(20) == EXIT_FENCED
    assert first.poll() is None
    assert life(store)["lives"] == 1


def test_cpus_pin_the_children(store, start) -> None:
    cpu = min(os.sched_getaffinity(0))
    assert start({"seconds": 0.1}, "--cpus", str(cpu)).wait(20) == 0
    assert life(store)["cpus"] == [cpu]


@pytest.mark.parametrize(("arguments", "expected"), [([], (False, None)), (["--idle"], (True, "1"))])
def test_an_idle_child_gives_way_and_has_one_thread(store, start, arguments, expected) -> None:
    assert start({"seconds": 0.1}, *arguments).wait(20) == 0
    assert (life(store)["idle"], life(store)["xla_threads"]) == expected
    if life(store)["autogroup"]:
        assert life(store)["autogroup"].endswith("nice 19") == expected[0]


def test_cpus_that_do_not_exist_are_refused_with_a_record(store, start) -> None:
    supervisor = start({}, "--cpus", "4096")
    assert supervisor.wait(20) == EXIT_CONFIG
    assert "4096" in supervisor.stderr.read().decode()
    assert (record(store).exit_code, record(store).state) == (EXIT_CONFIG, "exited")


@pytest.mark.parametrize("arguments", [[], ["--", "true", "--replicas"], ["--cpus", "x", "--", "true"]])
def test_bad_arguments_say_what_is_accepted(arguments: list[str]) -> None:
    base = ["--run", "r", "--process", "p", "--submission-key", "k"]
    if arguments == ["--", "true", "--replicas"]:
        assert parse(base + arguments).command == ("true", "--replicas")
        return
    with pytest.raises(ConfigError, match="accepted"):
        parse(base + arguments)


def test_stop_run_ends_every_process_and_says_how(store, start) -> None:
    supervisor = start({"waits": True, "ignores_stop": True})
    child = life(store)["pid"]
    outcome = process_table.stop_run(store, reason="test", source="test", voluntary_seconds=0.5)
    assert outcome == {"worker": "terminated"}
    assert pid_start(child) is None
    assert supervisor.wait(5) is not None
    assert process_table.stop_run(store, reason="test", source="test") == {}


def test_identity_survives_no_pid_reuse() -> None:
    me = identify(os.getpid())
    assert me.is_alive()
    other = me.__class__(host=me.host, boot_id=me.boot_id, pid=me.pid, pid_start=me.pid_start + 1)
    assert not other.is_alive()
    assert not other.send(0)

"""The service without Airflow: its folder, its secrets, its processes. The real one: tests/airflow."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tunix_core.console.service import AirflowService, ServiceError, ServiceOptions, default_options, main
from tunix_core.errors import ConfigError
from tunix_core.processes import identify, pid_start, spawn_detached, wait_until

OPTIONS = ServiceOptions(dags_folder="/dags", store_roots=("file:///runs", "gs://bucket/x"), import_paths=("/project",))


@pytest.fixture
def service(tmp_path: Path) -> AirflowService:
    service = AirflowService(tmp_path / "home")
    service._prepare_home(OPTIONS)
    return service


def test_secrets_are_made_once_and_kept_private(service: AirflowService) -> None:
    first = service.environment()
    service._prepare_home(OPTIONS)
    again = service.environment()
    for name in ("AIRFLOW__API_AUTH__JWT_SECRET", "AIRFLOW__CORE__FERNET_KEY", "AIRFLOW__API__SECRET_KEY"):
        assert len(first[name]) > 30
        assert first[name] == again[name]
    for name in ("service.json", "passwords.json"):
        assert stat.S_IMODE((service.home / name).stat().st_mode) == 0o600
    assert json.loads((service.home / "passwords.json").read_text()) == {"admin": service.credentials[1]}
    other = AirflowService(service.home.parent / "other")
    other._prepare_home(OPTIONS)
    assert other.credentials[1] != service.credentials[1]


def test_everything_listens_on_loopback_only(service: AirflowService) -> None:
    environment = service.environment()
    assert environment["AIRFLOW__API__HOST"] == "127.0.0.1"
    assert environment["AIRFLOW__CORE__EXECUTION_API_SERVER_URL"] == f"{service.base_url}/execution/"
    assert service.base_url.startswith("http://127.0.0.1:")
    assert environment["TUNIX_STORE_ROOTS"] == "file:///runs,gs://bucket/x"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == "/project"
    assert os.listdir(environment["AIRFLOW__CORE__PLUGINS_FOLDER"]) == []


def test_airflow_settings_of_the_caller_do_not_leak_in(
    service: AirflowService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "CeleryExecutor")
    monkeypatch.setenv("AIRFLOW_CONFIG", "/elsewhere")
    environment = service.environment()
    assert environment["AIRFLOW__CORE__EXECUTOR"] == "LocalExecutor"
    assert "AIRFLOW_CONFIG" not in environment


def test_a_port_is_kept_while_it_is_free(service: AirflowService) -> None:
    port = service._state()["port"]
    service._prepare_home(OPTIONS)
    assert service._state()["port"] == port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        service._prepare_home(OPTIONS)
    assert service._state()["port"] != port


def test_cpus_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="4096"):
        AirflowService(tmp_path / "home")._prepare_home(dataclasses.replace(OPTIONS, cpus=(4096,)))


def test_a_component_that_leaks_workers_is_cleaned_up_after(service: AirflowService) -> None:
    """A leader is killed; its worker lives on in its session and is found by the recorded pid."""
    code = "import subprocess,sys,time; subprocess.Popen([sys.executable,'-c','import time; time.sleep(100)']); time.sleep(100)"
    leader = spawn_detached([sys.executable, "-c", code], service.environment())
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
    with service._locked_state() as state:
        state["processes"] = {"scheduler": dataclasses.asdict(identify(leader))}

    def workers() -> list[int]:
        children = Path(f"/proc/{leader}/task/{leader}/children")
        return [int(pid) for pid in children.read_text().split()] if children.exists() else []

    assert wait_until(lambda: bool(workers()), 120)
    worker = workers()[0]
    assert service.components()["scheduler"] is not None
    os.kill(leader, signal.SIGKILL)
    assert wait_until(lambda: service.components()["scheduler"] is None, 120)
    assert pid_start(worker) is not None
    service.stop()
    assert pid_start(worker) is None
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_home_without_a_service_says_how_to_get_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ServiceError, match="make up"):
        AirflowService(tmp_path).base_url  # noqa: B018
    assert main(["status", "--home", str(tmp_path)]) != 0
    assert "make up" in capsys.readouterr().err
    assert main(["down", "--home", str(tmp_path)]) == 0


def test_default_options_name_this_projects_dags() -> None:
    options = default_options(["some/runs"])
    assert (Path(options.dags_folder) / "post_training.py").exists()
    assert options.store_roots == (f"file://{Path.cwd()}/some/runs",)

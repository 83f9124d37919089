"""A private Airflow on this machine: start, stop, and the HTTP client that talks to it.

The four components run as detached processes, each in a session of its own, bound to 127.0.0.1
(`airflow standalone` serves worker logs on all interfaces and cannot be told otherwise, and it
leaves children behind when it is terminated). Everything the service owns lies under its home:
configuration, database, logs and `service.json`, which names ports, secrets and processes, so
that another command can find, stop or mend a service that this process did not start.

Only HTTP and the command line reach Airflow from here; nothing of it is imported.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import fcntl
import importlib.metadata
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tunix_core.console.airflow_client import AirflowClient
from tunix_core.console.reaper import reap_ended_runs, runs_with_processes
from tunix_core.errors import ConfigError, TunixError, report_error
from tunix_core.processes import ProcessIdentity, free_port, identify, session_members, spawn_detached, terminate
from tunix_core.storage.process_table import stop_run
from tunix_core.storage.store import normalize_uri, open_store

COMPONENTS = {
    "api-server": ("api-server", "--host", "127.0.0.1"),
    "scheduler": ("scheduler", "--skip-serve-logs"),
    "dag-processor": ("dag-processor",),
    "triggerer": ("triggerer", "--skip-serve-logs"),
}
"""Command line of each component. Log servers stay off: the api-server reads the same disk."""

_PIN = "import os,sys\nos.sched_setaffinity(0,map(int,sys.argv[1].split(',')))\nos.execv(sys.argv[2],sys.argv[2:])\n"

ADMIN_USER = "admin"
DAGS = ("post_training", "evaluate_trajectories")
DEFAULT_HOME = Path(".airflow")
DEFAULT_ROOT = Path("runs")


class ServiceError(TunixError):
    """The local Airflow did not start, or is not there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """What one service is started with."""

    dags_folder: str
    store_roots: tuple[str, ...]
    """Roots that run URIs must lie under; DAGs choose among them."""
    import_paths: tuple[str, ...] = ()
    """Folders put on PYTHONPATH: the project, when it runs from a checkout."""
    cpus: tuple[int, ...] = ()
    """CPUs that Airflow's own processes may use; empty: all."""
    parallelism: int = 16
    environment: tuple[tuple[str, str], ...] = ()
    """More environment variables for every component."""


def _write_private(path: Path, text: str) -> None:
    """Replace a file as a whole, readable by its owner only."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.rename(path)


class AirflowService:
    """The Airflow of one home folder, whoever started it.

    Args:
        home: becomes AIRFLOW_HOME.
    """

    def __init__(self, home: str | Path) -> None:
        self.home = Path(home).resolve()
        self._state_path = self.home / "service.json"

    # ------------------------------------------------------------------ state

    def _state(self) -> dict[str, Any]:
        try:
            state: dict[str, Any] = json.loads(self._state_path.read_text())
        except FileNotFoundError:
            raise ServiceError(f"{self._state_path}: no service was started there; `make up` starts one.") from None
        return state

    @contextlib.contextmanager
    def _locked_state(self) -> Iterator[dict[str, Any]]:
        """Change service.json; two commands that start or stop at once take turns."""
        with (self.home / ".service.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = self._state() if self._state_path.exists() else {}
            yield state
            _write_private(self._state_path, json.dumps(state, indent=1))

    @property
    def exists(self) -> bool:
        return self._state_path.exists()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._state()['port']}"

    @property
    def credentials(self) -> tuple[str, str]:
        """User and password of the administrator."""
        return ADMIN_USER, self._state()["password"]

    @property
    def store_roots(self) -> list[str]:
        """Roots that runs of this service lie under."""
        return list(self._state()["options"]["store_roots"])

    def client(self) -> AirflowClient:
        return AirflowClient(self.base_url, *self.credentials)

    def log_path(self, component: str) -> Path:
        return self.home / "service-logs" / f"{component}.log"

    def components(self) -> dict[str, ProcessIdentity | None]:
        """Each component's process; None when it does not run."""
        recorded = self._state().get("processes", {})
        result: dict[str, ProcessIdentity | None] = {}
        for name in COMPONENTS:
            process = ProcessIdentity(**recorded[name]) if name in recorded else None
            result[name] = process if process is not None and process.is_alive() else None
        return result

    # ------------------------------------------------------------------ start

    def start(self, options: ServiceOptions, *, timeout_seconds: float = 180.0) -> None:
        """Start what does not run yet and wait until every component is healthy.

        The password and the secrets of an earlier start are kept, ports too while they are free.

        Raises:
            ServiceError: a component ended or did not become healthy in time; says which and the
                end of its log. Whatever had started is stopped again.
        """
        self._prepare_home(options)
        try:
            self._migrate(timeout_seconds)
            for name in COMPONENTS:
                self.start_component(name)
            self.wait_healthy(timeout_seconds)
        except BaseException:
            self.stop()
            raise

    def _prepare_home(self, options: ServiceOptions) -> None:
        for cpu in options.cpus:
            if cpu not in os.sched_getaffinity(0):
                raise ConfigError(
                    "service.cpus",
                    cpu,
                    f"CPUs of this machine: {sorted(os.sched_getaffinity(0))}",
                    "Name existing ones or none.",
                )
        for folder in (self.home, self.home / "no-plugins", self.home / "service-logs"):
            folder.mkdir(parents=True, exist_ok=True)
        self.home.chmod(0o700)
        with self._locked_state() as state:
            running = self._state_path.exists() and any(self.components().values())
            if not running:
                self._reap_sessions(state)
                state["port"] = self._keep_port(state.get("port"))
            state.setdefault("password", secrets.token_urlsafe(12))
            state.setdefault("jwt_secret", secrets.token_urlsafe(48))
            state.setdefault("api_secret", secrets.token_urlsafe(32))
            state.setdefault("fernet_key", base64.urlsafe_b64encode(secrets.token_bytes(32)).decode())
            state["options"] = dataclasses.asdict(options)
        _write_private(self.home / "passwords.json", json.dumps({ADMIN_USER: self.credentials[1]}))

    @staticmethod
    def _keep_port(port: int | None) -> int:
        """The port of the last start, so that a page left open goes on working, or a free one."""
        if port is not None:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with contextlib.suppress(OSError):
                    probe.bind(("127.0.0.1", port))
                    return port
        return free_port()

    def environment(self) -> dict[str, str]:
        """Environment of every component; `airflow …` by hand works in it too."""
        state = self._state()
        options = state["options"]
        url = f"http://127.0.0.1:{state['port']}"
        settings = {
            "CORE__DAGS_FOLDER": options["dags_folder"],
            "CORE__PLUGINS_FOLDER": str(self.home / "no-plugins"),
            "CORE__LOAD_EXAMPLES": "False",
            "CORE__EXECUTOR": "LocalExecutor",
            "CORE__PARALLELISM": str(options["parallelism"]),
            "CORE__MAX_ACTIVE_TASKS_PER_DAG": str(options["parallelism"]),
            "CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
            "CORE__HOSTNAME_CALLABLE": "socket.gethostname",  # asks no name server
            "CORE__FERNET_KEY": state["fernet_key"],
            "CORE__SIMPLE_AUTH_MANAGER_USERS": f"{ADMIN_USER}:admin",
            "CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(self.home / "passwords.json"),
            "API_AUTH__JWT_SECRET": state["jwt_secret"],
            "API__SECRET_KEY": state["api_secret"],
            "API__HOST": "127.0.0.1",
            "API__PORT": str(state["port"]),
            "API__BASE_URL": url,
            "API__WORKERS": "1",
            "DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{self.home}/airflow.db",
            "DATABASE__LOAD_DEFAULT_CONNECTIONS": "False",
            "DAG_PROCESSOR__REFRESH_INTERVAL": "15",
            "DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "30",
            "DAG_PROCESSOR__PARSING_PROCESSES": "1",
            "LOGGING__BASE_LOG_FOLDER": str(self.home / "logs"),
            "LOGGING__LOGGING_LEVEL": "INFO",
            "USAGE_DATA_COLLECTION__ENABLED": "False",
        }
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW_", "_AIRFLOW"))}
        environment |= {f"AIRFLOW__{key}": value for key, value in settings.items()}
        paths = [*options["import_paths"], *filter(None, [os.environ.get("PYTHONPATH")])]
        environment |= {
            "AIRFLOW_HOME": str(self.home),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": os.pathsep.join(paths),
            "TUNIX_STORE_ROOTS": ",".join(options["store_roots"]),
            "NO_COLOR": "1",
            "PYTHONUNBUFFERED": "1",
        }
        return environment | dict(options["environment"])

    def _spawn(self, name: str, arguments: Sequence[str]) -> ProcessIdentity:
        command = [sys.executable, "-m", "airflow", *arguments]
        cpus = self._state()["options"]["cpus"]
        if cpus:
            command = [sys.executable, "-S", "-E", "-c", _PIN, ",".join(map(str, cpus)), *command]
        return identify(spawn_detached(command, self.environment(), output=self.log_path(name), cwd=self.home))

    def _migrate(self, timeout_seconds: float) -> None:
        """Create or upgrade the database. Nothing to do while a component runs on it."""
        if any(self.components().values()):
            return
        try:
            with self.log_path("migrate").open("ab") as log:
                subprocess.run(
                    [sys.executable, "-m", "airflow", "db", "migrate"],
                    env=self.environment(),
                    cwd=self.home,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    check=True,
                    timeout=timeout_seconds,
                )
        except subprocess.SubprocessError as error:
            raise ServiceError(f"{error}:\n{self.log_tail('migrate')}") from error

    def start_component(self, name: str) -> ProcessIdentity:
        """Start one component; returns the running one when there is one already."""
        if name not in COMPONENTS:
            raise ConfigError("component", name, ", ".join(COMPONENTS), "Name one of them.")
        with self._locked_state() as state:
            running = self.components()[name]
            if running is not None:
                return running
            self._reap_sessions(state, name)
            arguments = list(COMPONENTS[name])
            if name == "api-server":
                arguments += ["--port", str(state["port"])]
            process = self._spawn(name, arguments)
            state.setdefault("processes", {})[name] = dataclasses.asdict(process)
            return process

    def log_tail(self, component: str, num_bytes: int = 3000) -> str:
        try:
            return self.log_path(component).read_bytes()[-num_bytes:].decode(errors="replace")
        except FileNotFoundError:
            return ""

    def wait_healthy(self, timeout_seconds: float) -> None:
        """Return once the API answers and reports every component healthy.

        Raises:
            ServiceError: not in time, or a component ended meanwhile.
        """
        deadline = time.monotonic() + timeout_seconds
        client = self.client()
        health: dict[str, Any] = {}
        while time.monotonic() < deadline:
            for name, process in self.components().items():
                if process is None:
                    raise ServiceError(f"the {name} ended while starting:\n{self.log_tail(name)}")
            with contextlib.suppress(TunixError):
                health = client.health()
                if all(health.get(part) == "healthy" for part in ("scheduler", "triggerer", "dag_processor")):
                    return
            time.sleep(0.25)
        raise ServiceError(
            f"Airflow is not healthy after {timeout_seconds:g} s: {health}; see {self.home}/service-logs"
        )

    # ------------------------------------------------------------------- stop

    def stop_component(self, name: str, *, grace_seconds: float = 15.0) -> None:
        """End one component and what it leaves behind in its session."""
        with self._locked_state() as state:
            process = self.components().get(name)
            if process is not None:
                terminate([process], grace_seconds)
            self._reap_sessions(state, name)

    def stop(self, *, grace_seconds: float = 15.0) -> None:
        """End every component. Processes of training runs live on: they need no Airflow."""
        if not self.exists:
            return
        with self._locked_state() as state:
            # Not the whole session at once: a scheduler ends its workers in order when it can.
            terminate([p for p in self.components().values() if p is not None], grace_seconds)
            self._reap_sessions(state)

    def _reap_sessions(self, state: dict[str, Any], name: str | None = None) -> None:
        """Kill what is left of the sessions of components that have ended, and forget them.

        A killed scheduler leaks its workers. They stay in its session, whose number nothing else
        can get while they live, so the recorded pid still finds them.
        """
        recorded = state.get("processes", {})
        for component in [name] if name is not None else list(recorded):
            if component not in recorded:
                continue
            leader = ProcessIdentity(**recorded.pop(component))
            if leader.is_local:
                terminate(self._own(session_members(leader.pid)), 3.0)

    def _own(self, processes: list[ProcessIdentity]) -> list[ProcessIdentity]:
        """Those started with this service's home in their environment."""
        marker = f"AIRFLOW_HOME={self.home}".encode()
        own = []
        for process in processes:
            with contextlib.suppress(OSError):
                if marker in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    own.append(process)
        return own


def default_options(store_roots: Sequence[str], *, cpus: tuple[int, ...] = ()) -> ServiceOptions:
    """Options of a service that runs this project's DAGs, from a checkout or installed."""
    project = Path(__file__).resolve().parents[2]
    # In the path twice (installed, and as a checkout), Airflow would find the plugin twice.
    installed = any(
        Path(str(found.locate_file(""))).resolve() != project
        for found in importlib.metadata.distributions(name="tunix-airflow")
    )
    return ServiceOptions(
        dags_folder=str(project / "dags"),
        store_roots=tuple(normalize_uri(root) for root in store_roots),
        import_paths=() if installed else (str(project),),
        cpus=cpus,
    )


def up(home: Path, roots: Sequence[str]) -> None:
    """Start the service, end what outlived its DAG run, and say where the UI is."""
    service = AirflowService(home)
    service.start(default_options(roots))
    client = service.client()
    for dag_id in DAGS:
        client.wait_for_dag(dag_id)
        client.unpause(dag_id)
    for uri, processes in reap_ended_runs(service.store_roots, client).items():
        print(f"ended what was left of {uri}: {', '.join(sorted(processes))}")
    user, password = service.credentials
    print(f"Airflow: {service.base_url}   user {user}   password {password}")


def down(home: Path) -> None:
    """Stop the service and every process of the runs that it can have started."""
    service = AirflowService(home)
    if not service.exists:
        print(f"no service was started in {home}")
        return
    roots = service.store_roots
    service.stop()
    for uri in runs_with_processes(roots):
        outcome = stop_run(open_store(uri), reason="the service was stopped", source="service down")
        print(f"stopped {', '.join(sorted(outcome)) or 'nothing'} of {uri}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tunix_core.console.service", description="The local Airflow.")
    parser.add_argument("command", choices=["up", "down", "status"])
    parser.add_argument("--home", type=Path, default=DEFAULT_HOME, help="folder of the service (%(default)s)")
    parser.add_argument("--root", action="append", help=f"store root for runs, repeatable ({DEFAULT_ROOT})")
    options = parser.parse_args(argv)
    try:
        if options.command == "up":
            up(options.home, options.root or [str(DEFAULT_ROOT)])
        elif options.command == "down":
            down(options.home)
        else:
            for name, process in AirflowService(options.home).components().items():
                print(f"{name:14} {'pid ' + str(process.pid) if process else 'down'}")
    except TunixError as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Supervisor of one process of a run: `python -m tasks.supervise --run URI --process NAME … -- argv`.

It starts the program (or `--replicas` of them), keeps the process's record fresh, publishes its
log, obeys the run's stop object and leaves the exit code behind. Airflow reads all that from the
run directory and may come and go meanwhile.

The children die with the supervisor, even when it is killed. `{process}` and `{attempt}` in their
command are filled in, a replica of a pool being NAME-0, NAME-1, …; a command without them gets
`--process NAME --attempt N` at its end. The main thread handles processes only; what
touches the store runs in a thread of its own, so that a store that hangs delays no signal.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from tasks.supervised_log import SupervisedLog, local_log_folder
from tunix_core import paths
from tunix_core.errors import EXIT_FENCED, ConfigError, Fenced, TunixError, is_retryable, report_error
from tunix_core.processes import identify
from tunix_core.storage import control, process_table
from tunix_core.storage.control import ProcessRecord
from tunix_core.storage.store import ObjectStore, open_store

_TICK_SECONDS = 0.1
_STOP_SECONDS = 1.0
_LOG_SECONDS = 3.0
_KILL_AFTER_SECONDS = 10.0
"""Between SIGTERM and SIGKILL of a child."""
_FINAL_RECORD_SECONDS = 60.0
"""How long a store that fails is asked again to take the exit code."""
_MAX_BACKOFF_SECONDS = 10.0

PROGRESS_COUNTS = ("clock", "episodes", "shards")
"""Figures of a heartbeat that only work done makes rise."""

_DIE_WITH_PARENT = (
    "import ctypes,os,sys\n"
    "ctypes.CDLL(None).prctl(1,9)\n"  # PR_SET_PDEATHSIG, SIGKILL; kept across exec
    "os.getppid()==int(sys.argv[1]) or os._exit(137)\n"
    "os.execvp(sys.argv[2],sys.argv[2:])\n"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    run: str
    process: str
    submission_key: str
    command: tuple[str, ...]
    replicas: int = 0
    """0: one process that bears the name itself; otherwise a pool NAME-0, NAME-1, …."""
    attempt: int = 0
    """The attempt that a launcher has claimed; 0 claims one here."""
    cpus: tuple[int, ...] | None = None
    """None: as inherited; empty: every CPU of the machine."""
    idle: bool = False
    restarts: int = 0
    grace_seconds: float = 20.0
    """From a stop request of a failed run to SIGTERM."""
    completed_grace_seconds: float = 180.0
    """… of a completed one, whose processes still have work to publish."""
    ignore_stop: bool = False

    @property
    def child_names(self) -> list[str]:
        return [f"{self.process}-{i}" for i in range(self.replicas)] if self.replicas else [self.process]


def parse(argv: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="python -m tasks.supervise", description=__doc__.split("\n\n")[0])
    parser.add_argument("--run", required=True, help="URI of the run directory")
    parser.add_argument("--process", required=True, help="name of the process")
    parser.add_argument("--submission-key", required=True, help="the same key is the same work")
    parser.add_argument("--replicas", type=int, default=0, help="size of the pool; 0: not a pool")
    parser.add_argument("--attempt", type=int, default=0, help="the attempt that the launcher claimed")
    parser.add_argument("--cpus", default=None, help="0,1 pins; 'all' undoes an inherited pinning")
    parser.add_argument("--idle", action="store_true", help="only on CPUs that nothing else wants; one XLA thread")
    parser.add_argument("--restarts", type=int, default=0, help="per replica, refilled by progress")
    parser.add_argument("--grace-seconds", type=float, default=Options.grace_seconds)
    parser.add_argument("--completed-grace-seconds", type=float, default=Options.completed_grace_seconds)
    parser.add_argument("--ignore-stop", action="store_true", help="for work that follows a run's end")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- program and arguments")
    values = vars(parser.parse_args(argv))
    command = tuple(values.pop("command"))
    command = command[1:] if command[:1] == ("--",) else command
    if not command:
        raise ConfigError("command", argv, "-- program arguments…", "Name the program after '--'.")
    if values["replicas"] < 0 or values["restarts"] < 0:
        raise ConfigError("replicas, restarts", values, "0 or more", "Mend the number.")
    paths.name("process", values["process"])
    return Options(**{**values, "cpus": _parse_cpus(values["cpus"]), "command": command})


def _parse_cpus(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if text == "all":
        return ()
    try:
        cpus = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError("cpus", text, "numbers separated by commas, or 'all'", "Write 0,1.") from None
    return cpus


def give_way() -> None:
    """Let this process and its children run only where nothing else wants the CPU, with one XLA thread each."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # Where sessions are groups to the scheduler, a policy counts inside its session only: the session gives way too.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")
    os.environ["NPROC"] = "1"  # what XLA's CPU client takes for the number of CPUs


def pin(cpus: tuple[int, ...]) -> None:
    """Restrict this process, and so its children, to these CPUs; empty: all of the machine's.

    Raises:
        ConfigError: a CPU that the machine does not have or does not lend to this process.
    """
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the kernel keeps what its cpuset allows
    available = os.sched_getaffinity(0)
    if not cpus:
        return
    if not available.issuperset(cpus):
        raise ConfigError(
            "launcher cpus", list(cpus), f"CPUs of this machine: {sorted(available)}", "Correct the launcher section."
        )
    os.sched_setaffinity(0, cpus)


class Child:
    """One replica over its restarts."""

    def __init__(self, name: str, restarts: int) -> None:
        self.name = name
        self.restarts_left = restarts
        self.process: subprocess.Popen[bytes] | None = None
        self.exit_code: int | None = None
        self.last_code = 0
        """Of the life that ended last, while the next is due."""
        self.failures = 0
        """In a row without progress; sets the back-off."""
        self.start_at = 0.0
        self.started_at = 0.0
        self.baseline: dict[str, int] | None = None
        """Counts of the first heartbeat of this life."""

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.exit_code is None

    @property
    def has_ended(self) -> bool:
        return self.exit_code is not None

    def signal(self, signum: int) -> None:
        if self.is_running:
            assert self.process is not None
            self.process.send_signal(signum)  # our own child, not reaped yet: the pid is its own

    def see_heartbeat(self, beat: control.Heartbeat | None, restarts: int) -> None:
        """Refill the budget once a count of work done has risen in this life."""
        if beat is None or beat.updated_at < self.started_at:
            return
        counts = {k: v for k in PROGRESS_COUNTS if isinstance(v := beat.progress.get(k), int)}
        if self.baseline is None:
            self.baseline = counts
        elif any(value > self.baseline.get(key, value) for key, value in counts.items()):
            self.restarts_left, self.failures = restarts, 0


class Supervisor:
    """Runs the children of one attempt to their end."""

    def __init__(self, options: Options, store: ObjectStore, record: ProcessRecord) -> None:
        self.options = options
        self._store = store
        self._record = record
        self.children = [Child(name, options.restarts) for name in options.child_names]
        self._logs = {
            name: SupervisedLog(store, name, local_log_folder(options.run), record.attempt)
            for name in options.child_names
        }
        self._culprit: Child | None = None
        """Whose failure brought the others down."""
        self._signalled = False
        self._stop_at: float | None = None
        """When SIGTERM is due (monotonic)."""
        self._stop_seen = False
        self._terminated_at: float | None = None
        self._fenced = threading.Event()
        self._done = threading.Event()

    # ------------------------------------------------------------ main thread

    def run(self) -> int:
        """Returns the exit code of the process: 0, or that of the child that ended it."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_signal)
        keeper = threading.Thread(target=self._keep, name="record keeper", daemon=True)
        for child in self.children:
            self._start(child)
        keeper.start()
        while not all(child.has_ended for child in self.children):
            self._reap()
            self._restart_due()
            self._escalate()
            time.sleep(_TICK_SECONDS)
        self._done.set()
        code, reason = self._outcome()
        if not self._fenced.is_set():
            keeper.join(timeout=10)
            self._publish_end(code, reason)
        return code

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        self._signalled = True

    def _arguments(self, child: Child) -> list[str]:
        values = {"{process}": child.name, "{attempt}": str(self._record.attempt)}
        if not values.keys() & set(self.options.command):
            return [*self.options.command, "--process", child.name, "--attempt", str(self._record.attempt)]
        return [values.get(word, word) for word in self.options.command]

    def _start(self, child: Child) -> None:
        arguments = self._arguments(child)
        with self._logs[child.name].open() as output:
            child.process = subprocess.Popen(
                [sys.executable, "-S", "-E", "-c", _DIE_WITH_PARENT, str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        child.started_at = time.time()
        child.baseline = None

    def _reap(self) -> None:
        for child in self.children:
            if not child.is_running or child.process is None:
                continue
            code = child.process.poll()
            if code is None:
                continue
            self._logs[child.name].note(f"{child.name} ended with exit code {code}")
            stopping = self._stopping
            if code != 0 and not stopping and is_retryable(code) and child.restarts_left > 0:
                child.restarts_left -= 1
                child.failures += 1
                delay = min(_MAX_BACKOFF_SECONDS, 0.25 * 2**child.failures)
                child.process, child.last_code, child.start_at = None, code, time.monotonic() + delay
                self._logs[child.name].note(f"restarting in {delay:g} s, {child.restarts_left} restarts left")
            else:
                child.exit_code = code
                if code != 0 and not stopping:
                    self._culprit = child
                    self._terminate()  # a pool stands or falls together

    def _restart_due(self) -> None:
        for child in self.children:
            if child.process is None and not child.has_ended:
                if self._stopping:
                    child.exit_code = child.last_code  # no restart is wanted any more
                elif time.monotonic() >= child.start_at:
                    self._start(child)

    @property
    def _stopping(self) -> bool:
        return self._signalled or self._stop_seen or self._terminated_at is not None or self._fenced.is_set()

    def _terminate(self) -> None:
        if self._terminated_at is None:
            self._terminated_at = time.monotonic()
            for child in self.children:
                child.signal(signal.SIGTERM)

    def _escalate(self) -> None:
        now = time.monotonic()
        if self._fenced.is_set() or (
            self._terminated_at is not None and now - self._terminated_at > _KILL_AFTER_SECONDS
        ):
            for child in self.children:
                child.signal(signal.SIGKILL)
        elif self._signalled or (self._stop_at is not None and now >= self._stop_at):
            self._terminate()

    def _outcome(self) -> tuple[int, str]:
        if self._fenced.is_set():
            return EXIT_FENCED, "another attempt took over"
        failed = self._culprit or next((child for child in self.children if child.exit_code != 0), None)
        if failed is None:
            return 0, "completed"
        code = failed.exit_code or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return code, f"{failed.name}: {how}; {self._logs[failed.name].last_line()}"

    # ------------------------------------------------------------ keeper thread

    def _keep(self) -> None:
        next_record = next_log = time.monotonic()
        while not self._done.wait(timeout=_STOP_SECONDS):
            try:
                self._look_for_stop()
                if time.monotonic() >= next_record:
                    next_record = time.monotonic() + process_table.REFRESH_SECONDS
                    self._record = process_table.publish(self._store, self._record)
                    self._look_at_heartbeats()
                if time.monotonic() >= next_log:
                    next_log = time.monotonic() + _LOG_SECONDS
                    self._publish_logs()
            except Fenced as error:
                for log in self._logs.values():
                    log.note(str(error))
                self._fenced.set()
                return
            except (TunixError, OSError) as error:  # a store out of reach costs freshness, not the work
                next(iter(self._logs.values())).note(f"the run directory is out of reach: {error}")

    def _look_for_stop(self) -> None:
        if self.options.ignore_stop or self._stop_seen:
            return
        stop = control.read_stop(self._store)
        if stop is not None:
            grace = self.options.grace_seconds if stop.failed else self.options.completed_grace_seconds
            self._stop_at = time.monotonic() + grace
            self._stop_seen = True

    def _look_at_heartbeats(self) -> None:
        if self.options.restarts:
            for child in self.children:
                child.see_heartbeat(control.read_heartbeat(self._store, child.name), self.options.restarts)

    def _publish_logs(self) -> None:
        for log in self._logs.values():
            log.publish()

    def _publish_end(self, code: int, reason: str) -> None:
        ended = dataclasses.replace(self._record, state="exited", exit_code=code, reason=reason)
        deadline = time.monotonic() + _FINAL_RECORD_SECONDS
        while True:
            try:
                self._publish_logs()
                process_table.publish(self._store, ended)
                return
            except Fenced:
                return
            except (TunixError, OSError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(1.0)


def supervise(options: Options) -> int:
    """Take over the claimed attempt (or claim one) and run it; returns the exit code."""
    store = open_store(options.run)
    if options.attempt:
        found = control.read_process(store, options.process)
        if found is None or (found[0].attempt, found[0].submission_key) != (options.attempt, options.submission_key):
            raise Fenced(f"{options.process}: attempt {options.attempt} is not the recorded one: {found}")
        record = found[0]
    else:
        claim = process_table.claim(store, options.process, options.submission_key)
        if not claim.new:
            raise Fenced(f"{options.process}: {options.submission_key!r} runs already or has succeeded")
        record = claim.record
    me = identify(os.getpid())
    record = dataclasses.replace(record, host=me.host, boot_id=me.boot_id, pid=me.pid, pid_start=me.pid_start)
    record = process_table.publish(store, dataclasses.replace(record, state="running"))
    try:
        if options.cpus is not None:
            pin(options.cpus)
        if options.idle:
            give_way()
        code = Supervisor(options, store, record).run()
    except TunixError as error:
        ended = dataclasses.replace(record, state="exited", exit_code=error.exit_code, reason=str(error))
        process_table.publish(store, ended)
        raise
    return code if code >= 0 else 128 - code


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return supervise(parse(sys.argv[1:] if argv is None else argv))
    except TunixError as error:
        return report_error(error)


if __name__ == "__main__":
    sys.exit(main())

"""What every process of a run does at its two ends: arguments, signals, configuration, exit code."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from tunix_core.config import RunConfig
from tunix_core.errors import EXIT_SUCCESS, EXIT_UNEXPECTED, TunixError, report_error
from tunix_core.storage.run_directory import read_run
from tunix_core.storage.store import ObjectStore, open_store
from tunix_core.storage.writers import new_incarnation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One life of one process."""

    store: ObjectStore
    config: RunConfig
    extra: Mapping[str, Any]
    """What else `run.json` holds."""
    process: str
    attempt: int
    incarnation: str
    interrupted: threading.Event
    """Set by SIGTERM or SIGINT: finish the unit in hand, flush, end."""
    arguments: argparse.Namespace
    """The command line, a module's own arguments included."""

    def log(self, text: str) -> None:
        """A line of the process's log."""
        print(text, flush=True)


def run_task(
    module: str,
    body: Callable[[Task], None],
    argv: list[str] | None = None,
    *,
    process: str | None = None,
    configure: Callable[[argparse.ArgumentParser], None] = lambda _parser: None,
) -> int:
    """Parse the command line, run `body`, and return the exit code that its outcome maps to.

    Args:
        process: name of the process where `--process` gives none; that of the module by default.
        configure: adds arguments of the module's own; they are in `Task.arguments`.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tasks.{module}")
    parser.add_argument("--run", required=True, help="URI of the run directory")
    parser.add_argument("--process", default=process or module, help="name of the process within the run")
    parser.add_argument("--attempt", type=int, default=1, help="which attempt of it this is")
    configure(parser)
    arguments = parser.parse_args(argv)
    interrupted = threading.Event()

    def on_signal(*_: object) -> None:
        interrupted.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, on_signal)
    try:
        store = open_store(arguments.run)
        config, extra = read_run(store)
        body(
            Task(
                store=store,
                config=config,
                extra=extra,
                process=arguments.process,
                attempt=arguments.attempt,
                incarnation=new_incarnation(),
                interrupted=interrupted,
                arguments=arguments,
            )
        )
    except TunixError as error:
        return report_error(error)
    except Exception:
        traceback.print_exc()
        return EXIT_UNEXPECTED
    return EXIT_SUCCESS

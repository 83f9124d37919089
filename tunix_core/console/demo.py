"""The main job, start to report: `python -m tunix_core.console.demo --recipe lookup --seed 0 --store local`.

Starts a local Airflow of its own, triggers the DAG `post_training`, shows the run while it goes on, and
leaves `summary.json` and `report.html` in the report folder. On a terminal the UI stays up until Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tunix_core import paths
from tunix_core.config_loading import load_recipe, parse_overrides
from tunix_core.console.airflow_client import AirflowClient, AirflowError
from tunix_core.console.emulator import Emulator, start_fake_gcs
from tunix_core.console.live import RunView, render
from tunix_core.console.service import AirflowService, default_options
from tunix_core.errors import EXIT_UNEXPECTED, ConfigError, ObjectMissing, TunixError, report_error
from tunix_core.evaluation.summary import goals
from tunix_core.storage.process_table import stop_run
from tunix_core.storage.store import join_uri, open_store

DAG_ID = "post_training"
EXIT_GOALS_MISSED = 3
REFRESH_SECONDS = 1.0
PLAIN_LINE_SECONDS = 5.0
TASKS_SECONDS = 3.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """From the command line."""

    recipe: str
    seed: int
    store: str
    overrides: Mapping[str, Any]
    model: Path | None
    """A pretrained model to import for the run."""
    reports: Path
    home: Path
    timeout_seconds: float
    keep_up: bool


def split_cpus() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The learner's CPU, and those of everything else; empty on a machine with a single one."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        return (), ()
    return (cpus[-1],), tuple(cpus[:-1])


def launcher_overrides() -> dict[str, Any]:
    """Where the run's processes run on this machine."""
    learner_cpus, other_cpus = split_cpus()
    return {
        "launcher.learner_cpus": list(learner_cpus),
        "launcher.other_cpus": list(other_cpus),
        # Everywhere, behind everyone: they use what the learner leaves of its CPU.
        "launcher.idle_actors": bool(learner_cpus),
    }


def run_overrides(options: DemoOptions) -> dict[str, Any]:
    """The run's options beyond the recipe: where its processes run, unless the person said so."""
    return {**launcher_overrides(), **options.overrides}


class Demo:
    """One demonstration. `run` returns the exit code."""

    def __init__(self, options: DemoOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._service = AirflowService(options.home)
        self._emulator: Emulator | None = None
        self._view = RunView()
        self._tasks: dict[str, str | None] = {}
        self._run_uri = ""

    def run(self) -> int:
        # A mistake in the recipe is a mistake of the person: say so before anything starts.
        load_recipe(self._options.recipe, {**run_overrides(self._options), "seed": self._options.seed})
        try:
            client, run_id = self._start()
            state = self._watch(client, run_id)
            code = self._conclude(client, run_id, state, self._collect())
            if self._options.keep_up and self._console.is_terminal:
                self._wait_for_interrupt()
            return code
        finally:
            self._shut_down()

    def _start(self) -> tuple[AirflowClient, str]:
        root = str(self._options.home / "runs")
        environment: tuple[tuple[str, str], ...] = ()
        if self._options.store == "gs":
            self._emulator = start_fake_gcs()
            os.environ.update(self._emulator.env)
            environment = tuple(self._emulator.env.items())
            root = f"{self._emulator.uri}/runs"
        else:
            Path(root).mkdir(parents=True, exist_ok=True)
        pretrained = self._import_model(root)
        self._console.print("starting Airflow …")
        service_options = default_options([root], cpus=split_cpus()[1])
        self._service.start(dataclasses.replace(service_options, environment=environment))
        client = self._service.client()
        client.wait_for_dag(DAG_ID)
        client.unpause(DAG_ID)
        conf = {
            "recipe": self._options.recipe,
            "seed": self._options.seed,
            "overrides": {**run_overrides(self._options), **pretrained},
        }
        run_id = client.trigger(DAG_ID, conf)
        self._run_uri = join_uri(self._service.store_roots[0], paths.run_name(DAG_ID, run_id))
        self._console.print(self._address())
        return client, run_id

    def _import_model(self, root: str) -> dict[str, Any]:
        """Bring the pretrained model under the root of the runs; returns the option that names it."""
        source = self._options.model
        if source is None:
            return {}
        uri = join_uri(root, f"models/{self._options.recipe}")
        command = [sys.executable, "-m", "tasks.import_model", "--source", str(source), "--to", uri]
        self._console.print(f"importing {source.name} …")
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError("--model", str(source), "a model that can be imported", done.stderr.strip())
        return {"model.pretrained_uri": uri}

    def _address(self) -> str:
        user, password = self._service.credentials
        return f"{self._service.base_url}   user {user}   password {password}"

    def _watch(self, client: AirflowClient, run_id: str) -> str:
        """Show the run until it ends; returns its state."""
        store = open_store(self._run_uri)
        deadline = time.monotonic() + self._options.timeout_seconds
        title = f"{self._options.recipe}, seed {self._options.seed}"
        due_tasks = due_line = 0.0
        state, printed = "queued", ""
        with Live(console=self._console, auto_refresh=False, transient=False) as live:
            while state not in ("success", "failed"):
                now = time.monotonic()
                if now > deadline:
                    raise AirflowError(f"the run took longer than {self._options.timeout_seconds:.0f} s")
                self._view.refresh(store)
                if now >= due_tasks:
                    due_tasks = now + TASKS_SECONDS
                    state = self._ask(client, run_id, state)
                if self._console.is_terminal:
                    view = render(self._view, title=title, tasks=self._tasks, address=self._address())
                    live.update(view, refresh=True)
                elif now >= due_line:
                    due_line = now + PLAIN_LINE_SECONDS
                    if (line := self._view.line()) != printed:
                        print(line, flush=True)
                        printed = line
                time.sleep(REFRESH_SECONDS)
        return state

    def _ask(self, client: AirflowClient, run_id: str, state: str) -> str:
        """The DAG run's state; an Airflow that does not answer is no reason to stop watching."""
        try:
            states = client.task_states(DAG_ID, run_id)
            self._tasks = {
                task if index < 0 else f"{task}[{index}]": value for (task, index), value in sorted(states.items())
            }
            return client.state(DAG_ID, run_id)
        except AirflowError:
            return state

    def _collect(self) -> dict[str, Any] | None:
        """Copy summary and report out of the run directory; None where a failed run has none."""
        store = open_store(self._run_uri)
        folder = self._options.reports
        try:
            files = {name: store.get(paths.REPORTS + name) for name in ("summary.json", "report.html")}
        except ObjectMissing:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        self._console.print(f"report: {folder / 'report.html'}")
        summary: dict[str, Any] = json.loads(files["summary.json"])
        return summary

    def _conclude(self, client: AirflowClient, run_id: str, state: str, summary: dict[str, Any] | None) -> int:
        if state != "success" or summary is None:
            failed = [f"{name} {value}" for name, value in self._tasks.items() if value not in ("success", None)]
            self._console.print(f"the run ended as {state}: {', '.join(failed)}", style="bold red")
            for (task, index), value in client.task_states(DAG_ID, run_id).items():
                if value == "failed":
                    lines = client.logs(DAG_ID, run_id, task, map_index=index)[-12:]
                    self._console.print(f"--- {task}\n" + "\n".join(lines), markup=False)
            return EXIT_UNEXPECTED
        missed = [text for text, met in goals(summary) if not met]
        self._console.print(_summary_table(summary))
        for text in missed:
            self._console.print(f"goal missed: {text}", style="bold red")
        return EXIT_GOALS_MISSED if missed else 0

    def _wait_for_interrupt(self) -> None:
        self._console.print(f"Airflow stays up: {self._address()}\nCtrl-C ends it.")
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            self._console.print("stopping …")

    def _shut_down(self) -> None:
        # A second Ctrl-C must not leave half of it running.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            if self._service.exists:
                self._service.stop()
            if self._run_uri:
                stop_run(open_store(self._run_uri), reason="the demonstration has ended", source="demo")
        finally:
            if self._emulator is not None:
                self._emulator.stop()


def _summary_table(summary: Mapping[str, Any]) -> Table:
    before, after = summary["success_before"], summary["success_after"]
    ratio = summary["tokens_per_second_vs_full_buffer"]
    rows = {
        "held-out success before": f"{before['value']:.1%}  ({before['low']:.1%} to {before['high']:.1%})",
        "held-out success after": f"{after['value']:.1%}  ({after['low']:.1%} to {after['high']:.1%}, {after['n']} tasks)",
        "wall time": f"{summary['wall_seconds']:.0f} s",
        "actor processes": str(summary["num_actor_processes"]),
        "policy versions": str(summary["num_policy_versions"]),
        "staleness": f"mean {summary['mean_staleness']:.2f}, max {summary['max_staleness_seen']} "
        f"of {summary['max_staleness']}, {summary['staleness_violations']} violations",
        "tokens read": f"{summary['ledger']['read']:,}",
        "discarded as stale": f"{summary['stale_fraction']:.1%}",
        "learner busy": f"{summary['learner_busy_fraction']:.1%}",
        "learner tokens/s": f"{summary['tokens_per_second']:.0f}"
        + (f", {ratio:.2f} of its full-buffer rate" if ratio is not None else ""),
        "compilations after warm-up": str(summary["compilations_after_warmup"]),
    }
    table = Table(show_header=False, title=f"{summary['recipe']}, seed {summary['seed']}", title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _options(argv: list[str] | None) -> DemoOptions:
    parser = argparse.ArgumentParser(prog="python -m tunix_core.console.demo", description=__doc__)
    parser.add_argument("--recipe", default="lookup")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=["local", "gs"], default="local", help="gs: an emulated bucket")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="repeatable")
    parser.add_argument("--model", type=Path, help="pretrained model to import: a Hugging Face folder or a .gguf file")
    parser.add_argument("--reports", type=Path, default=Path("reports/demo"), help="folder (%(default)s)")
    parser.add_argument("--home", type=Path, help="folder of Airflow and the runs (a new one in ./.airflow)")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds (%(default)s)")
    parser.add_argument("--no-keep-up", action="store_true", help="end Airflow with the run, on a terminal too")
    arguments = parser.parse_args(argv)
    home = arguments.home
    if home is None:
        Path(".airflow").mkdir(exist_ok=True)
        home = Path(tempfile.mkdtemp(prefix="demo-", dir=".airflow"))
    return DemoOptions(
        recipe=arguments.recipe,
        seed=arguments.seed,
        store=arguments.store,
        overrides=parse_overrides(arguments.set),
        model=arguments.model,
        reports=arguments.reports,
        home=home.resolve(),
        timeout_seconds=arguments.timeout,
        keep_up=not arguments.no_keep_up,
    )


def main(argv: list[str] | None = None) -> int:
    console = Console()

    def on_terminate(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, on_terminate)
    try:
        return Demo(_options(argv), console).run()
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    except TunixError as error:
        return report_error(error)


if __name__ == "__main__":
    sys.exit(main())

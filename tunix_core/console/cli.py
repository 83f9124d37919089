"""`tunixctl`: a run's state, its trajectories, its evaluations, from the run directory."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

from tunix_core import paths
from tunix_core.archive.views import parquet_files
from tunix_core.config_loading import parse_overrides
from tunix_core.console import simulation, trajectories
from tunix_core.console.environment import show_environment
from tunix_core.errors import ConfigError, TunixError, report_error
from tunix_core.evaluation.held_out import read_evaluations
from tunix_core.storage.control import read_heartbeats, read_processes, read_stop, request_profile
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.run_directory import read_run
from tunix_core.storage.store import ObjectStore, open_store
from tunix_core.types import LEDGER_CLASSES


def status(store: ObjectStore, console: Console) -> None:
    """What the run's processes, ledger and policies are at."""
    config, extra = read_run(store)
    stop = read_stop(store)
    console.print(f"{store.uri}\nrecipe {config.recipe}, seed {config.seed}, run {extra.get('run_id', '')}")
    console.print("running" if stop is None else f"ended: {stop.reason} (by {stop.source})")
    processes = Table("process", "state", "attempt", "exit", "pid", title="processes", title_justify="left")
    for name, record in sorted(read_processes(store).items()):
        code = "" if record.exit_code is None else str(record.exit_code)
        processes.add_row(name, record.state, str(record.attempt), code, str(record.pid or ""))
    console.print(processes)
    learner = {name: beat.progress for name, beat in read_heartbeats(store).items()}.get("learner")
    current = PolicyStore(store).current()
    console.print(f"policy version: {'none' if current is None else current.version}")
    if learner:
        console.print(f"step {learner['clock']} of {learner['num_steps']}, {learner['state']}")
        if "staleness_mean" in learner:
            console.print(f"staleness: mean {learner['staleness_mean']:.2f}, oldest {learner['staleness_max']}")
        ledger = Table("class", "tokens", title="ledger", title_justify="left")
        for name in ("read", *LEDGER_CLASSES):
            ledger.add_row(name, f"{learner['ledger'][name]:,}")
        console.print(ledger)
    for version, found in read_evaluations(store).items():
        s = found.success
        console.print(
            f"held-out success of version {version}: {s.value:.1%} ({s.low:.1%} to {s.high:.1%}, {s.n} tasks)"
        )


def profile(store: ObjectStore, console: Console, steps: int, name: str | None) -> None:
    """Ask the learner for a trace of its next steps.

    Raises:
        ConfigError: the run is over, `steps` out of bounds, or `name` is none.
    """
    stop = read_stop(store)
    if stop is not None:
        raise ConfigError("--run", store.uri, "a run that goes on", f"This one has ended: {stop.reason}.")
    request = request_profile(store, id=name or time.strftime("%Y%m%dt%H%M%S", time.gmtime()), steps=steps)
    console.print(
        f"asked for a trace of {request.steps} steps; once its MANIFEST.json is there: "
        f"tensorboard --logdir {store.uri.removeprefix('file://')}/{paths.profile(request.id).rstrip('/')}",
        soft_wrap=True,
    )


def _task(module: str, *arguments: str) -> int:
    """Run an entry point; its exit code."""
    return subprocess.run([sys.executable, "-m", f"tasks.{module}", *arguments], check=False).returncode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tunixctl", description="Looks into the run directory of a post-training run."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text)
        added.add_argument("--run", required=True, help="URI of the run directory")
        return added

    command("status", "processes, clock, versions, ledger, staleness, evaluations")
    listed = command("trajectories", "the newest trajectories, or one transcript")
    listed.add_argument("id", nargs="?", help="show this one")
    listed.add_argument("--limit", type=int, default=20, help="lines (%(default)s)")
    listed.add_argument("--tokens", action="store_true", help="with an id: token by token, colored by log probability")
    trajectories.add_selection(listed)
    exported = command("export-trajectories", "trajectories to a .jsonl file or a folder for Hugging Face datasets")
    exported.add_argument("--to", required=True, help="FILE.jsonl, or a missing or an empty folder")
    trajectories.add_selection(exported)
    brought = command("import-trajectories", "what export-trajectories wrote, as shards of a run")
    brought.add_argument("--from", dest="source", required=True, help="FILE.jsonl or a folder")
    asked = command("sql", "DuckDB over the views trajectories, turns, consumed, evaluations, metrics_<process>")
    asked.add_argument("statement", help="such as: select environment, avg(reward) from trajectories group by all")
    asked.add_argument("--csv", action="store_true", help="instead of a table")
    evaluate = command("evaluate", "a policy version on held-out tasks")
    evaluate.add_argument("--version", default="last", help="first, last or a number (%(default)s)")
    trace = command("profile", "asks the learner for a jax.profiler trace of its next steps")
    trace.add_argument("--steps", type=int, default=3, help="how many (%(default)s)")
    trace.add_argument("--id", help="names the trace; each name is traced once (default: the time)")
    command("files", "the Parquet files that hold every trajectory once")
    compact = command("compact", "which hours' shards can become few files; --apply does it")
    compact.add_argument("--apply", action="store_true", help="shards go once retention.grace_seconds are over")
    replay = command("replay", "executes a step again and compares its weights, to the bit")
    replay.add_argument("--step", type=int, required=True, help="the clock after the step, from 1")
    export = command("export-model", "a policy version as a Hugging Face folder, adapters merged")
    export.add_argument("--version", default="last", help="first, last or a number (%(default)s)")
    export.add_argument("--to", required=True, help="a missing or an empty folder")
    export.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(%(default)s)")
    environment = commands.add_parser("environment", help="an episode of an environment: opening, tools, rewards")
    environment.add_argument("name", help="of this package, or an installed one")
    environment.add_argument("--seed", type=int, default=0, help="of the task; odd ones are held out (%(default)s)")
    environment.add_argument(
        "--say", action="append", default=[], help="a policy message, in place of the demonstration"
    )
    environment.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="repeatable")
    imported = commands.add_parser("import-model", help="a pretrained model into a store, verified tensor by tensor")
    imported.add_argument("--source", required=True, help="a Hugging Face folder, or a .gguf file")
    imported.add_argument("--to", required=True, help="URI of the model folder, new or holding the same model")
    simulation.add_arguments(
        commands.add_parser(
            "simulate", help="a pool and a learner in virtual time: how busy, how stale, what is discarded"
        )
    )
    commands.add_parser("plan", add_help=False, help="a run on a described TPU slice: memory, work, what to change")
    return parser


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["plan"]:  # it needs JAX, which this process does without
        return _task("plan", *argv[1:])
    arguments = _parser().parse_args(argv)
    console = Console()
    if arguments.command == "import-model":
        return _task("import_model", "--source", arguments.source, "--to", arguments.to)
    try:
        if arguments.command == "simulate":
            simulation.run(arguments, console)
            return 0
        if arguments.command == "environment":
            overrides = parse_overrides(arguments.set)
            show_environment(console, arguments.name, arguments.seed, overrides, arguments.say)
            return 0
        store = open_store(arguments.run)
        read_run(store)
        if arguments.command == "status":
            status(store, console)
        elif arguments.command == "evaluate":
            return _task("evaluate", "--run", arguments.run, "held-out", "--version", arguments.version)
        elif arguments.command == "files":
            sys.stdout.writelines(f"{file}\n" for file in parquet_files(store))
        elif arguments.command == "compact":
            return _task("compact", "--run", arguments.run, *(["--apply"] if arguments.apply else []))
        elif arguments.command == "replay":
            return _task("replay", "--run", arguments.run, "--step", str(arguments.step))
        elif arguments.command == "export-model":
            options = ("--version", arguments.version, "--to", arguments.to, "--dtype", arguments.dtype)
            return _task("export_model", "--run", arguments.run, *options)
        elif arguments.command == "profile":
            profile(store, console, arguments.steps, arguments.id)
        elif arguments.command == "export-trajectories":
            trajectories.export_trajectories(store, console, trajectories.selection_of(arguments), arguments.to)
        elif arguments.command == "import-trajectories":
            trajectories.bring_trajectories(store, console, arguments.source)
        elif arguments.command == "sql":
            trajectories.answer(store, console, arguments.statement, as_csv=arguments.csv)
        elif arguments.id and arguments.tokens:
            return _task("show_trajectory", "--run", arguments.run, "--id", arguments.id)
        elif arguments.id:
            trajectories.show_trajectory(store, console, arguments.id)
        else:
            trajectories.list_trajectories(store, console, trajectories.selection_of(arguments), arguments.limit)
    except TunixError as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())

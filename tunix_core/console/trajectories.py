"""`tunixctl trajectories`, `export-trajectories`, `import-trajectories` and `sql`."""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import json
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from tunix_core.archive.files import read_dataset, read_jsonl, write_dataset, write_jsonl
from tunix_core.archive.importing import import_trajectories
from tunix_core.archive.selection import Found, Selection, select
from tunix_core.archive.views import query
from tunix_core.errors import ConfigError
from tunix_core.storage.store import ObjectStore
from tunix_core.tokenizer import Tokenizer
from tunix_core.types import Trajectory

_SHADES = ((-0.05, "#41ab5d"), (-0.7, "#a6d96a"), (-2.3, "#fdae61"), (-4.6, "#f46d43"), (-np.inf, "#e31a1c"))
"""Colors of policy tokens by log probability: at least the first bound, and so on."""
_MAX_CELL = 80


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Options that choose trajectories."""
    for name, text in (
        ("environment", "by its name"),
        ("split", "train or held_out"),
        ("finish-reason", "such as completed"),
        ("actor", "its id"),
        ("group", "its id"),
    ):
        parser.add_argument(f"--{name}", default="", help=text)
    for name in ("min-reward", "max-reward"):
        parser.add_argument(f"--{name}", type=float, help="of the episode")
    for name in ("min-version", "max-version"):
        parser.add_argument(f"--{name}", type=int, help="of the policy that generated it")
    for name in ("since", "until"):
        parser.add_argument(f"--{name}", help="a time, such as 2026-11-30T14:00 (UTC unless it says otherwise)")
    outcome = parser.add_mutually_exclusive_group()
    outcome.add_argument("--solved", dest="solved", action="store_true", default=None, help="reward of 1 or more")
    outcome.add_argument("--failed", dest="solved", action="store_false", default=None, help="less")


def selection_of(arguments: argparse.Namespace) -> Selection:
    """Raises ConfigError."""
    fields = {}
    for name in ("environment", "split", "finish_reason", "actor", "group"):
        fields[name] = getattr(arguments, name)
    for name in ("solved", "min_reward", "max_reward", "min_version", "max_version"):
        if getattr(arguments, name) is not None:
            fields[name] = getattr(arguments, name)
    for name in ("since", "until"):
        if getattr(arguments, name) is not None:
            fields[name] = _seconds(f"--{name}", getattr(arguments, name))
    return Selection(**fields)


def _seconds(option: str, text: str) -> float:
    try:
        at = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(option, text, "an ISO 8601 time", "Write it like 2026-11-30T14:00.") from None
    return (at if at.tzinfo else at.replace(tzinfo=datetime.UTC)).timestamp()


def _complain(reason: str) -> None:
    print(reason, file=sys.stderr)


# ---- to look at ---------------------------------------------------------------------------------


def list_trajectories(store: ObjectStore, console: Console, selection: Selection, limit: int) -> None:
    """The newest that the selection holds, a line each.

    Raises:
        ConfigError: a limit below 1.
    """
    if limit < 1:
        raise ConfigError("--limit", limit, "at least 1", "Ask for a line or more.")
    names = ("environment", "version", "reward", "turns", "tokens", "finish")
    table = Table(Column("trajectory", overflow="fold", min_width=22), *names)
    chosen = select(store, selection, newest_first=True, refused=_complain)
    for _, _, trajectory in itertools.islice(chosen, limit):
        low, high = trajectory.policy_version_min, trajectory.policy_version_max
        table.add_row(
            trajectory.trajectory_id,
            trajectory.environment,
            str(low) if low == high else f"{low} to {high}",
            f"{trajectory.reward:g}",
            str(sum(turn.role == "policy" for turn in trajectory.turns)),
            str(trajectory.num_tokens),
            trajectory.finish_reason,
        )
    console.print(table)


def find(store: ObjectStore, trajectory_id: str) -> Found:
    """
    Raises:
        ConfigError: no such trajectory.
    """
    if trajectory_id:
        for found in select(store, Selection(trajectory=trajectory_id), newest_first=True):
            return found
    raise ConfigError("trajectory", trajectory_id, "an id of this run", "List them: tunixctl trajectories --run URI.")


def show_trajectory(store: ObjectStore, console: Console, trajectory_id: str) -> None:
    """One transcript; what the policy generated is set off, with version and mean log probability per turn.

    Raises:
        ConfigError: no such trajectory.
    """
    shard, row, trajectory = find(store, trajectory_id)
    console.print(f"{shard} row {row}", style="dim")
    # One message per turn; marks of the chat template belong to turns and to no message.
    for turn, message in zip(trajectory.turns, json.loads(trajectory.messages), strict=True):
        is_policy = turn.role == "policy"
        text = Text().append(f"{turn.role:7}", style="dim")
        text.append(message["content"], style="bold cyan" if is_policy else "")
        if is_policy:
            logprob = float(trajectory.behavior_logprobs[turn.start : turn.end].mean())
            text.append(
                f"   version {_versions(trajectory, turn.start, turn.end)}, mean logprob {logprob:.3f}", style="dim"
            )
        if turn.reward:
            text.append(f"   reward {turn.reward:g}", style="green" if turn.reward > 0 else "red")
        if turn.tool_name:
            text.append(f"   {turn.tool_name}{'' if turn.tool_ok else ' failed'}, {turn.seconds:.2f} s", style="dim")
        console.print(text)
    _last_line(console, trajectory)


def show_tokens(store: ObjectStore, trajectory_id: str, tokenizer: Tokenizer, console: Console | None = None) -> None:
    """One transcript token by token: policy tokens colored by their log probability, the version where it changes.

    Raises:
        ConfigError: no such trajectory.
    """
    console = console or Console()
    shard, row, trajectory = find(store, trajectory_id)
    console.print(f"{shard} row {row}", style="dim")
    legend = Text().append("log probability: ", style="dim")
    for bound, color in _SHADES:
        legend.append(f"{'below' if bound == -np.inf else f'{bound:g} and above'} ", style=color)
    console.print(legend)
    for turn in trajectory.turns:
        text = Text().append(f"{turn.role:7}", style="dim")
        version = None
        for place in range(turn.start, turn.end):
            piece = tokenizer.decode([int(trajectory.tokens[place])])
            if not trajectory.loss_mask[place]:
                text.append(piece, style="dim")
                continue
            if version != (version := int(trajectory.token_policy_version[place])):
                text.append(f"[{version}]", style="bold magenta")
            text.append(piece, style=f"bold {_shade(float(trajectory.behavior_logprobs[place]))}")
        if turn.reward:
            text.append(f"   reward {turn.reward:g}", style="green" if turn.reward > 0 else "red")
        console.print(text, soft_wrap=True)
    _last_line(console, trajectory)


def _shade(logprob: float) -> str:
    return next(color for bound, color in _SHADES if logprob >= bound)


def _versions(trajectory: Trajectory, start: int, end: int) -> str:
    return ", ".join(map(str, sorted(set(trajectory.token_policy_version[start:end].tolist()))))


def _last_line(console: Console, trajectory: Trajectory) -> None:
    console.print(
        f"reward {trajectory.reward:g}  {json.dumps(dict(trajectory.reward_components))}  {trajectory.finish_reason}, "
        f"temperature {trajectory.temperature:g}, {trajectory.generation_seconds:.2f} s of generation, "
        f"{trajectory.environment_seconds:.2f} s of the environment",
        soft_wrap=True,
    )


# ---- to carry -----------------------------------------------------------------------------------


def export_trajectories(store: ObjectStore, console: Console, selection: Selection, to: str) -> None:
    """To a `.jsonl` file, or to a folder that Hugging Face `datasets` loads.

    Raises:
        ConfigError: something lies there.
    """
    chosen = (found.trajectory for found in select(store, selection, refused=_complain))
    path = Path(to)
    if path.suffix == ".jsonl":
        num = write_jsonl(path, chosen)
    else:
        num = write_dataset(path, chosen, split=selection.split or "train", source=store.uri.rsplit("/", 1)[-1])
    console.print(f"{num} trajectories: {to}", soft_wrap=True)


def bring_trajectories(store: ObjectStore, console: Console, source: str) -> None:
    """From what `export_trajectories` wrote.

    Raises:
        ConfigError: there is no such file or folder.
        DataError: a trajectory that the learner would refuse.
    """
    path = Path(source)
    if path.suffix == ".jsonl" and not path.is_file():
        raise ConfigError(
            "--from", source, "an existing .jsonl file or a folder with data/*.parquet", "Check the path."
        )
    imported = import_trajectories(store, lambda: read_jsonl(path) if path.suffix == ".jsonl" else read_dataset(path))
    console.print(
        f"{imported.num_trajectories} trajectories in {imported.num_shards} shards, written by incarnation {imported.incarnation}"
    )


# ---- to ask -------------------------------------------------------------------------------------


def answer(store: ObjectStore, console: Console, sql: str, *, as_csv: bool) -> None:
    """The answer to a statement, as a table or as CSV.

    Raises:
        ConfigError: no valid statement.
    """
    found = query(store, sql)
    if as_csv:
        writer = csv.writer(sys.stdout)
        writer.writerow(found.column_names)
        writer.writerows(zip(*(column.to_pylist() for column in found.columns), strict=True))
        return
    table = Table(*found.column_names)
    for row in zip(*(column.to_pylist() for column in found.columns), strict=True):
        table.add_row(*(_cell(value) for value in row))
    console.print(table)


def _cell(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_CELL else f"{text[: _MAX_CELL - 1]}…"

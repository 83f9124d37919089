"""The hours of a run that can be compacted, by hand: `python -m tasks.compact --run URI [--apply]`."""

from __future__ import annotations

import argparse
import sys

from tasks.entry import Task, run_task
from tunix_core.data.retention import Retention


def _compact(task: Task) -> None:
    retention = Retention(task.store, task.config.retention, owner=f"{task.process}-{task.incarnation}")
    hours = retention.compactable()
    for hour, why_not in hours.items():
        task.log(f"{hour}: {why_not or 'can be compacted'}")
    if not hours:
        task.log("no hour has shards that are not compacted")
    if task.arguments.apply:
        retention.compact(log=task.log)


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--apply", action="store_true", help="do it; shards go once retention.grace_seconds are over")


def main(argv: list[str] | None = None) -> int:
    return run_task("compact", _compact, argv, configure=_configure)


if __name__ == "__main__":
    sys.exit(main())

"""Verifies checkpoints and keeps the newest: `python -m tasks.checkpoint --run URI`."""

from __future__ import annotations

import sys

from tasks.entry import Task, run_task
from tunix_core.data.upkeep import tend_until_stopped


def _checkpoint(task: Task) -> None:
    tend_until_stopped(
        task.store,
        task.config,
        process=task.process,
        incarnation=task.incarnation,
        interrupted=task.interrupted,
        log=task.log,
    )


def main(argv: list[str] | None = None) -> int:
    return run_task("checkpoint", _checkpoint, argv)


if __name__ == "__main__":
    sys.exit(main())

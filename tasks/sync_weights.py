"""Publishes the learner's snapshots as policy versions: `python -m tasks.sync_weights --run URI`."""

from __future__ import annotations

import sys

from tasks.entry import Task, run_task
from tunix_core.data.publication import publish_until_stopped


def _sync(task: Task) -> None:
    publish_until_stopped(
        task.store,
        task.config,
        process=task.process,
        incarnation=task.incarnation,
        interrupted=task.interrupted,
        log=task.log,
    )


def main(argv: list[str] | None = None) -> int:
    return run_task("sync_weights", _sync, argv)


if __name__ == "__main__":
    sys.exit(main())

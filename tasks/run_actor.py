"""Generates trajectories until the run stops: `python -m tasks.run_actor --run URI --process actor-0-0`."""

from __future__ import annotations

import sys

from tasks.entry import Task, run_task


def _act(task: Task) -> None:
    from tunix_core.actor.loop import Actor
    from tunix_core.distributed.compilation import enable_compilation_cache

    enable_compilation_cache()
    Actor(
        task.store,
        task.config,
        process=task.process,
        incarnation=task.incarnation,
        interrupted=task.interrupted,
        log=task.log,
    ).run()


def main(argv: list[str] | None = None) -> int:
    return run_task("actor-0-0", _act, argv)


if __name__ == "__main__":
    sys.exit(main())

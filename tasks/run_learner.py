"""The learner: `python -m tasks.run_learner --run URI`."""

from __future__ import annotations

import sys

from tasks.entry import Task, run_task
from tunix_core.storage.control import read_stop


def _learn(task: Task) -> None:
    stop = read_stop(task.store)
    if stop is not None:
        task.log(f"the run is over ({stop.reason}, asked by {stop.source}); nothing to do")
        return
    # JAX only when there is something to train.
    from tunix_core.distributed.compilation import enable_compilation_cache
    from tunix_core.learner.credit import group_advantages
    from tunix_core.learner.decoder_trainer import DecoderTrainer
    from tunix_core.learner.loop import Learner
    from tunix_core.learner.weights import load_reference
    from tunix_core.storage.policies import PolicyStore

    enable_compilation_cache()

    Learner(
        task.store,
        task.config,
        DecoderTrainer(task.config),
        group_advantages(task.config.algorithm),
        policy_zero=PolicyStore(task.store).load(0)[0],
        reference=load_reference(task.store, task.config, task.extra),
        incarnation=task.incarnation,
        process=task.process,
        interrupted=task.interrupted.is_set,
        log=task.log,
    ).run()


def main(argv: list[str] | None = None) -> int:
    return run_task("run_learner", _learn, argv, process="learner")


if __name__ == "__main__":
    sys.exit(main())

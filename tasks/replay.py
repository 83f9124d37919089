"""Executes a step of a run again and compares its weights: `python -m tasks.replay --run URI --step N`."""

from __future__ import annotations

import argparse
import json
import sys

from tasks.entry import Task, run_task
from tunix_core.errors import DataError


def _replay(task: Task) -> None:
    from tunix_core.distributed.compilation import enable_compilation_cache
    from tunix_core.distributed.mesh import make_local_mesh
    from tunix_core.learner.decoder_trainer import DecoderTrainer
    from tunix_core.learner.replaying import replay_step
    from tunix_core.learner.weights import load_reference

    enable_compilation_cache()
    config, mesh = make_local_mesh(task.config)
    if config.mesh != task.config.mesh:
        task.log("the run's mesh reaches over several hosts: on one device its weights come out up to rounding")
    trainer = DecoderTrainer(config, mesh)
    reference = trainer.reference(load_reference(task.store, task.config, task.extra))
    found = replay_step(task.store, config, trainer, reference, task.arguments.step)
    task.log(f"step {found.step}, from the state at clock {found.start}")
    task.log(json.dumps({name: round(value, 6) for name, value in sorted(found.metrics.items())}))
    if found.identical is None:
        task.log(f"no weights of version {found.step} are kept: nothing to compare with")
    elif found.identical:
        task.log(f"identical to version {found.step}, to the bit")
    elif config.mesh != task.config.mesh:
        task.log(f"version {found.step} differs: {found.difference}")
    else:
        raise DataError(f"step {found.step}: weights differ from version {found.step}: {found.difference}")


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=int, required=True, help="the clock after the step, from 1")


def main(argv: list[str] | None = None) -> int:
    return run_task("replay", _replay, argv, configure=_configure)


if __name__ == "__main__":
    sys.exit(main())

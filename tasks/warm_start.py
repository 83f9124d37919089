"""Makes policy version 0: `python -m tasks.warm_start --run URI`.

From scripted demonstrations, or, where the run has a `start_uri`, that policy as it is. Done once per run: with
version 0 published it exits at once, so a repeated task changes nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from tasks.entry import Task, run_task
from tunix_core.config_loading import config_to_dict
from tunix_core.errors import Interrupted, ObjectExists
from tunix_core.storage.control import write_heartbeat
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.snapshots import SnapshotStore
from tunix_core.storage.store import finite_or_none


def _warm_start(task: Task) -> None:
    if PolicyStore(task.store).current() is not None:
        task.log("policy version 0 is published; nothing to do")
        return
    # JAX and its compilations only when there is something to train.
    from tunix_core.actor.rollout import Evaluator
    from tunix_core.distributed.compilation import enable_compilation_cache
    from tunix_core.environments import task_seed
    from tunix_core.learner.supervised import warm_start
    from tunix_core.learner.weights import load_start
    from tunix_core.models.parameters import (
        Params,
        adapted,
        base_parameters,
        init_parameters,
    )
    from tunix_core.pretrained.loading import load_tokenizer, pretrained_parameters

    enable_compilation_cache()
    config = task.config
    started = time.monotonic()
    start = load_start(config) if config.start_uri else None
    base = pretrained_parameters(config.model)
    fresh = init_parameters(config.model, config.seed)
    whole = base if base is not None else base_parameters(fresh)
    evaluator = Evaluator(config, fresh)
    seeds = [task_seed("held_out", i, config.seed) for i in range(config.evaluation.num_tasks)]

    def evaluate(params: Params) -> float:
        if task.interrupted.is_set():
            raise Interrupted("warm start: stopped by a signal before version 0 was published")
        return float(evaluator.run(adapted(config.model, params, whole), seeds).success.mean())

    def report(progress: dict[str, Any]) -> None:
        progress = {**progress, "seconds": round(time.monotonic() - started, 1)}
        write_heartbeat(task.store, task.process, progress)
        task.log("warm start: step {num_steps} loss {loss:.3f} held-out success {success:.3f}".format(**progress))

    if start is not None:
        params, sha256 = start
        success = evaluate(params)
        report({"num_steps": 0, "loss": float("nan"), "success": success})
        origin = {"start_uri": config.start_uri, "start_sha256": sha256}
        publish_start(task, params, {"held_out_success": success, "num_tasks": len(seeds), **origin})
        return
    result = warm_start(config, evaluate, report, tokenizer=load_tokenizer(config.model), pretrained=base)
    gate = {
        "held_out_success": result.success,
        "num_tasks": len(seeds),
        "num_steps": result.num_steps,
        "loss": result.loss,
    }
    publish_start(task, result.params, gate)


def publish_start(task: Task, params: Mapping[str, Any], gate: Mapping[str, Any]) -> None:
    """Publish what is trained (host arrays) as policy version 0, and as the snapshot that a learner starts from."""
    from tunix_core.models.parameters import flatten_parameters
    from tunix_core.pretrained.loading import base_entry

    tensors = flatten_parameters(dict(params))
    SnapshotStore(task.store).write(0, tensors, incarnation=task.incarnation)
    try:
        PolicyStore(task.store).publish(
            0,
            tensors,
            config=config_to_dict(task.config),
            parent=None,
            publisher=task.process,
            gate=finite_or_none(gate),
            base=base_entry(task.config.model),
        )
    except ObjectExists:
        task.log("another process published version 0 first; its weights stand")


def main(argv: list[str] | None = None) -> int:
    return run_task("warm_start", _warm_start, argv)


if __name__ == "__main__":
    sys.exit(main())

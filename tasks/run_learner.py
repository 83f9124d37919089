"""The learner: `python -m tasks.run_learner --run URI`, once on every host (`tunix_core.meeting`)."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import TYPE_CHECKING

from tasks.entry import Task, run_task
from tunix_core.errors import EXIT_UNEXPECTED, Interrupted, PeerLost, TunixError, report_error
from tunix_core.meeting import meeting_of
from tunix_core.storage.control import StopRequest, read_stop

if TYPE_CHECKING:
    from tunix_core.distributed.hosts import Hosts


def _learn(task: Task) -> None:
    if meeting_of() is None:
        if not _is_over(task, read_stop(task.store)):
            _train(task)
        return
    hosts = None
    try:
        import jax

        from tunix_core.distributed.hosts import initialise_from_environment, leave

        hosts = initialise_from_environment()
        stop = read_stop(task.store)
        if hosts.lead("start", stop is not None, any):
            _is_over(task, stop)
        else:
            _train(task, hosts)
        leave(hosts)
    except BaseException as error:
        code = _report(error)
        sys.stdout.flush()
        if hosts is not None and isinstance(error, Interrupted):
            # All have agreed to end and come here, too; whoever is later must still find host 0's service.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                leave(hosts)
        # JAX would wait for the others before it lets the process end, and they may be gone.
        os._exit(code)


def _is_over(task: Task, stop: StopRequest | None) -> bool:
    if stop is not None:
        task.log(f"the run is over ({stop.reason}, asked by {stop.source}); nothing to do")
    return stop is not None


def _report(error: BaseException) -> int:
    """Say what went wrong; returns the exit code."""
    if isinstance(error, TunixError):
        return report_error(error)
    import jax

    if isinstance(error, jax.errors.JaxRuntimeError):
        return report_error(PeerLost(f"a collective failed, as it does when another host is gone: {error}"))
    traceback.print_exception(error)
    sys.stderr.flush()
    return EXIT_UNEXPECTED


def _train(task: Task, hosts: Hosts | None = None) -> None:
    # JAX only when there is something to train.
    from tunix_core.distributed.compilation import enable_compilation_cache
    from tunix_core.distributed.hosts import ALONE
    from tunix_core.learner.credit import group_advantages
    from tunix_core.learner.decoder_trainer import DecoderTrainer
    from tunix_core.learner.loop import Learner
    from tunix_core.learner.weights import load_reference
    from tunix_core.storage.policies import PolicyStore

    hosts = hosts or ALONE
    enable_compilation_cache()
    trainer = DecoderTrainer(task.config)
    Learner(
        task.store,
        task.config,
        trainer,
        group_advantages(task.config.algorithm),
        policy_zero=PolicyStore(task.store).open(0)[0],
        reference=load_reference(task.store, task.config, task.extra),
        incarnation=hosts.lead("start", task.incarnation, lambda incarnations: incarnations[0]),
        process=task.process if hosts.is_first else f"{task.process}-host-{hosts.index}",
        hosts=hosts,
        share=trainer.share,
        interrupted=task.interrupted.is_set,
        log=task.log,
    ).run()


def main(argv: list[str] | None = None) -> int:
    return run_task("run_learner", _learn, argv, process="learner")


if __name__ == "__main__":
    sys.exit(main())

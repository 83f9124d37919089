"""`tasks.run_learner`, whose training is interrupted at once on host 0, and some seconds later on the others."""

from __future__ import annotations

import sys
import time

from tasks import run_learner
from tasks.entry import Task
from tunix_core.distributed.hosts import Hosts
from tunix_core.errors import Interrupted

_SECONDS = 3.0


def _train(task: Task, hosts: Hosts) -> None:
    del task
    hosts.gather("end", None)
    if not hosts.is_first:
        time.sleep(_SECONDS)  # as a heartbeat takes that goes to a slow store
    raise Interrupted("learner: interrupted")


if __name__ == "__main__":
    run_learner._train = _train  # type: ignore[assignment]
    sys.exit(run_learner.main())

"""Records of processes that really run."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from tunix_core.processes import identify
from tunix_core.storage.control import ProcessRecord


def running_record(**changes: Any) -> ProcessRecord:
    """The learner's record, as if the test's own process were it."""
    me = identify(os.getpid())
    record = ProcessRecord(
        process="learner",
        submission_key="key",
        attempt=1,
        host=me.host,
        boot_id=me.boot_id,
        pid=me.pid,
        pid_start=me.pid_start,
        state="running",
    )
    return dataclasses.replace(record, **changes)

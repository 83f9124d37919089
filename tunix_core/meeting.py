"""Where the processes ("hosts") of one learner meet, as the environment says. No JAX.

- A plain list: TUNIX_NUM_HOSTS, TUNIX_COORDINATOR (`address:port` of host 0) and TUNIX_HOST_INDEX on each.
- GKE JobSet: TUNIX_NUM_HOSTS, and JOBSET_NAME and REPLICATED_JOB_NAME from the pod's annotations; Kubernetes sets
  JOB_COMPLETION_INDEX.
- A TPU slice: TUNIX_NUM_HOSTS=auto, or several names in TPU_WORKER_HOSTNAMES, as GKE sets it; JAX asks the slice.

TUNIX_PEER_TIMEOUT_SECONDS (20) is how long a host may be silent before the others leave.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from tunix_core.errors import ConfigError

COORDINATOR, NUM_HOSTS, HOST_INDEX = "TUNIX_COORDINATOR", "TUNIX_NUM_HOSTS", "TUNIX_HOST_INDEX"
PEER_TIMEOUT = "TUNIX_PEER_TIMEOUT_SECONDS"
_PEER_TIMEOUT_SECONDS = 20
_PORT = 8476


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meeting:
    """Of several hosts."""

    coordinator: str = ""
    num_hosts: int = 0
    index: int = 0
    detected: bool = False
    """JAX finds out all of it."""
    peer_timeout_seconds: int = _PEER_TIMEOUT_SECONDS


def meeting_of(environ: Mapping[str, str] = os.environ) -> Meeting | None:
    """None for a learner of one process.

    Raises:
        ConfigError: half of it is there.
    """
    count = environ.get(NUM_HOSTS, "")
    silent = _number(PEER_TIMEOUT, environ.get(PEER_TIMEOUT, str(_PEER_TIMEOUT_SECONDS)), 1, 3600)
    if count == "auto" or (not count and "," in environ.get("TPU_WORKER_HOSTNAMES", "")):
        return Meeting(detected=True, peer_timeout_seconds=silent)
    if not count:
        given = [name for name in (COORDINATOR, HOST_INDEX) if environ.get(name)]
        if given:
            raise ConfigError(NUM_HOSTS, "", f"the number of hosts beside {given[0]}", "Set it, or unset the others.")
        return None
    num_hosts = _number(NUM_HOSTS, count, 1, 2**16)
    if num_hosts == 1:
        return None
    coordinator = environ.get(COORDINATOR, "")
    job_set, job = environ.get("JOBSET_NAME", ""), environ.get("REPLICATED_JOB_NAME", "")
    if not coordinator and job_set and job:
        coordinator = f"{job_set}-{job}-0-0.{job_set}:{_PORT}"
    address, _, port = coordinator.rpartition(":")
    if not address or not port.isdecimal():
        raise ConfigError(
            COORDINATOR,
            coordinator,
            "address:port of host 0",
            "Set it, or JOBSET_NAME and REPLICATED_JOB_NAME from the pod's annotations.",
        )
    index = environ.get(HOST_INDEX) or environ.get("JOB_COMPLETION_INDEX") or ""
    return Meeting(
        coordinator=coordinator,
        num_hosts=num_hosts,
        index=_number(HOST_INDEX, index, 0, num_hosts - 1),
        peer_timeout_seconds=silent,
    )


def _number(name: str, text: str, low: int, high: int) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        raise ConfigError(name, text, f"a number from {low} to {high}", "Set it on every host.")
    return int(text)

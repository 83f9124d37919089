"""Every key of a run directory. Nothing else in the project spells one.

Keys are relative to the run's URI and use `/`. Names that come from outside pass `name()` before
they become part of a key. Version and clock numbers are zero-padded, so that the order of keys is
the order of versions.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import re
from typing import NamedTuple

from tunix_core.errors import ConfigError, DataError

RUN = "run.json"
STOP = "control/stop.json"
LEARNER_SIGNAL = "control/learner.json"
PROFILE_REQUEST = "control/profile.json"
CURRENT_POLICY = "policies/CURRENT.json"
MANIFEST = "MANIFEST.json"
RETIRED = "RETIRED.json"
"""In the folder of a multi-file object: first half of its deletion; the second comes after a grace."""
SOURCES_RETIRED = "SOURCES_RETIRED.json"
"""In the folder of a compacted hour: its shards are to be deleted after a grace."""
FINISHED_BLOCKS = "tasks/FINISHED.json"
"""How many of the first task blocks are finished; where a new claimant starts to look."""

TRAJECTORIES = "trajectories/"
COMPACTED = "compacted/"
LEASES = "leases/"
TASKS = "tasks/"
WRITERS = "writers/"
STEPS = "steps/"
SNAPSHOTS = "snapshots/"
POLICIES = "policies/"
CHECKPOINTS = "checkpoints/"
QUARANTINE = "quarantine/"
HEARTBEATS = "heartbeats/"
PROCESSES = "processes/"
METRICS = "metrics/"
LOGS = "logs/"
EVALUATIONS = "evaluations/"
REPORTS = "reports/"
PROFILES = "profiles/"

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9_.\-]{0,126}[a-z0-9])?")
_SHARD = re.compile(
    r"trajectories/date=(?P<date>\d{4}-\d{2}-\d{2})/hour=(?P<hour>\d{2})/"
    r"(?P<actor>[a-z0-9_.\-]+)-(?P<incarnation>[a-z0-9]+)-(?P<sequence>\d{8})\.parquet"
)


def name(field: str, value: str) -> str:
    """Return `value` if it is safe as one component of a key.

    Raises:
        ConfigError: with the field, when it is not.
    """
    if not isinstance(value, str) or not _NAME.fullmatch(value) or ".." in value:
        raise ConfigError(
            field,
            value,
            "1 to 128 of a-z 0-9 _ . - that start and end with a letter or digit, without '..'",
            "Choose another name.",
        )
    return value


def run_name(dag_id: str, run_id: str) -> str:
    """A key component for an Airflow run.

    An Airflow run id contains `:` and `+`, which keys do not; a digest keeps ids apart that differ
    only in what is replaced or cut.
    """
    digest = hashlib.sha256(f"{dag_id}/{run_id}".encode()).hexdigest()[:8]
    readable = re.sub(r"[^a-z0-9]+", "-", f"{dag_id}-{run_id}".lower()).strip("-")[:100].strip("-")
    return name("run_id", f"{readable}-{digest}")


class ShardName(NamedTuple):
    """The parts of a shard's key."""

    hour: str
    """`date=YYYY-MM-DD/hour=HH`, the partition."""
    actor_id: str
    incarnation: str
    sequence: int

    @property
    def key(self) -> str:
        return f"{TRAJECTORIES}{self.hour}/{self.actor_id}-{self.incarnation}-{self.sequence:08d}.parquet"


def hour_partition(timestamp: float) -> str:
    """The partition of a moment (seconds since the epoch, UTC)."""
    moment = dt.datetime.fromtimestamp(timestamp, dt.UTC)
    return f"date={moment:%Y-%m-%d}/hour={moment:%H}"


def parse_shard(key: str) -> ShardName:
    """Split a shard's key; the inverse of `ShardName.key`.

    Raises:
        DataError: when the key does not have the form of a shard's key.
    """
    match = _SHARD.fullmatch(key)
    if match is None:
        raise DataError(
            f"shard key: received {key!r}, accepted trajectories/date=…/hour=…/<actor>-<incarnation>-<sequence>.parquet"
        )
    return ShardName(
        f"date={match['date']}/hour={match['hour']}", match["actor"], match["incarnation"], int(match["sequence"])
    )


def is_shard(key: str) -> bool:
    """Whether `parse_shard` takes it."""
    return _SHARD.fullmatch(key) is not None


def task_block(epoch: int, block: int) -> str:
    return f"{TASKS}{epoch:08d}/{block:08d}.json"


def writer(incarnation: str) -> str:
    return f"{WRITERS}{incarnation}.json"


def step(clock: int) -> str:
    return f"{STEPS}{clock:08d}.json"


def snapshot(version: int) -> str:
    return f"{SNAPSHOTS}{version:08d}/"


def snapshot_refusal(version: int) -> str:
    """Why the publication gate refused a snapshot; written beside it, once."""
    return f"{snapshot(version)}REFUSED.json"


def policy(version: int) -> str:
    return f"{POLICIES}{version:08d}/"


def checkpoint(clock: int) -> str:
    return f"{CHECKPOINTS}{clock:08d}/"


def compacted(hour: str) -> str:
    """Folder of the files that stand for an hour's shards."""
    return f"{COMPACTED}{hour}/"


def lease(lease_name: str) -> str:
    return f"{LEASES}{lease_name}.json"


def version_of(key: str) -> int:
    """The version or clock in a key under `snapshots/`, `policies/`, `checkpoints/` or `steps/`."""
    return int(key.split("/")[1].removesuffix(".json"))


def quarantine(shard_key: str) -> str:
    return f"{QUARANTINE}{shard_key.removeprefix(TRAJECTORIES).replace('/', '_')}.json"


def heartbeat(process: str) -> str:
    return f"{HEARTBEATS}{process}.json"


def process(process_name: str) -> str:
    """Launch record: host, boot id, pid, attempt, exit code. Written by the supervisor only."""
    return f"{PROCESSES}{process_name}.json"


def metrics(process_name: str, part: str) -> str:
    return f"{METRICS}{process_name}/{part}.parquet"


def log(process_name: str) -> str:
    return f"{LOGS}{process_name}.log"


def tensorboard(process_name: str, created_at: int, incarnation: str, part: int) -> str:
    """An event file; those of all lives of a process make one TensorBoard run, read in order of their names."""
    return f"{LOGS}tensorboard/{process_name}/events.out.tfevents.{created_at:010d}.{incarnation}.{part:04d}"


def profile(profile_id: str) -> str:
    return f"{PROFILES}{profile_id}/"


def profile_claim(profile_id: str) -> str:
    """Which learner runs a requested trace; created once, so that none runs it again."""
    return f"{profile(profile_id)}CLAIM.json"


def evaluation(evaluation_name: str, evaluator: str, partition: str, digest: str) -> str:
    """Folder of one evaluation of one partition by one evaluator version over one set of inputs."""
    return f"{EVALUATIONS}{evaluation_name}/{evaluator}/{partition}/{digest}/"

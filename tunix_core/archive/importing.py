"""Trajectories from files into a run, as an actor's life of its own: whole groups, checked as the learner checks them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from tunix_core.errors import DataError
from tunix_core.storage.shards import decode, encode
from tunix_core.storage.store import ObjectStore
from tunix_core.storage.trajectory_writer import TrajectoryWriter
from tunix_core.storage.writers import new_incarnation
from tunix_core.types import Trajectory

ACTOR_ID = "import"
GROUPS_PER_SHARD = 256


class Imported(NamedTuple):
    """What was written."""

    num_trajectories: int
    num_shards: int
    incarnation: str


def import_trajectories(store: ObjectStore, trajectories: Iterable[Trajectory]) -> Imported:
    """Write them as shards; members of a group must follow each other.

    Raises:
        DataError: a trajectory that the learner would refuse, or a group that comes twice. Shards before it are written,
            and stay: a second import of the same file would bring them again, under the same ids.
    """
    writer = TrajectoryWriter(store, actor_id=ACTOR_ID, incarnation=new_incarnation())
    try:
        num_trajectories = _write_all(writer, trajectories)
        num_shards = writer.next_sequence
    finally:
        writer.close()  # one left open has a share of what actors may begin, until it is declared dead
    return Imported(num_trajectories, num_shards, writer.incarnation)


def _write_all(writer: TrajectoryWriter, trajectories: Iterable[Trajectory]) -> int:
    seen: set[str] = set()
    waiting: list[Trajectory] = []
    num_trajectories = 0
    groups = itertools.groupby(trajectories, key=lambda trajectory: trajectory.group_id)
    for num_groups, (group_id, members) in enumerate(groups, start=1):
        if group_id in seen:
            raise DataError(
                f"group {group_id}: received in two places, accepted its members in one run of lines: sort them"
            )
        seen.add(group_id)
        waiting += members
        if num_groups % GROUPS_PER_SHARD == 0:
            num_trajectories += _write(writer, waiting)
            waiting = []
    return num_trajectories + (_write(writer, waiting) if waiting else 0)


def _write(writer: TrajectoryWriter, trajectories: list[Trajectory]) -> int:
    faults = decode(encode(trajectories)).faults
    if faults:
        row, reason = min(faults.items())
        raise DataError(f"trajectory {trajectories[row].trajectory_id}: {reason}")
    writer.write(trajectories)
    return len(trajectories)

"""Trajectories from files into a run, as an actor's life of its own: whole groups, checked as the learner checks them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tunix_core.errors import DataError
from tunix_core.storage.shards import check_group_sizes, decode, encode
from tunix_core.storage.store import ObjectStore
from tunix_core.storage.trajectory_writer import TrajectoryWriter
from tunix_core.storage.writers import new_incarnation
from tunix_core.types import Trajectory

ACTOR_ID = "import"
GROUPS_PER_SHARD = 256
TOKENS_PER_SHARD = 2_000_000


class Imported(NamedTuple):
    """What was written."""

    num_trajectories: int
    num_shards: int
    incarnation: str


def import_trajectories(store: ObjectStore, read: Callable[[], Iterable[Trajectory]]) -> Imported:
    """Write them as shards; members of a group must follow each other.

    Args:
        read: begins to read; called twice, since nothing is written before all of it has been judged.

    Raises:
        DataError: a trajectory that the learner would refuse, or a group that comes twice. Nothing is written then.
    """
    for trajectories in _shards(read()):
        check_group_sizes(trajectories)
        faults = decode(encode(trajectories)).faults
        if faults:
            row, reason = min(faults.items())
            raise DataError(f"trajectory {trajectories[row].trajectory_id}: {reason}")
    num_trajectories = 0
    writer = TrajectoryWriter(store, actor_id=ACTOR_ID, incarnation=new_incarnation())
    try:
        for trajectories in _shards(read()):
            writer.write(trajectories)
            num_trajectories += len(trajectories)
        num_shards = writer.next_sequence
    finally:
        writer.close()  # one left open has a share of what actors may begin, until it is declared dead
    return Imported(num_trajectories, num_shards, writer.incarnation)


def _shards(trajectories: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    """Whole groups, as many as make a shard."""
    seen: set[str] = set()
    waiting: list[Trajectory] = []
    num_groups = 0
    for group_id, members in itertools.groupby(trajectories, key=lambda trajectory: trajectory.group_id):
        if group_id in seen:
            raise DataError(
                f"group {group_id}: received in two places, accepted its members in one run of lines: sort them"
            )
        seen.add(group_id)
        waiting += members
        num_groups += 1
        if num_groups == GROUPS_PER_SHARD or sum(t.num_tokens for t in waiting) >= TOKENS_PER_SHARD:
            yield waiting
            waiting, num_groups = [], 0
    if waiting:
        yield waiting

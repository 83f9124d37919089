"""Groups under way: which members are still to play, which have delivered, which are lost. No I/O."""

from __future__ import annotations

import collections
import dataclasses

from tunix_core.actor.session import EpisodeFailed, EpisodeSpec
from tunix_core.environments import task_seed
from tunix_core.storage.task_blocks import TaskBlock
from tunix_core.types import Trajectory

EPISODE_ATTEMPTS = 3
"""How often a member is tried before its group goes on without it."""

MIN_EPISODES = 2
"""A group-relative advantage needs as many."""


@dataclasses.dataclass
class Group:
    """The G episodes of one task instance."""

    group_id: str
    block: TaskBlock
    size: int
    trajectories: list[Trajectory] = dataclasses.field(default_factory=list)
    num_lost: int = 0

    @property
    def is_closed(self) -> bool:
        return len(self.trajectories) + self.num_lost == self.size


class GroupBook:
    """Makes episodes of tasks, and groups of episodes.

    `waiting` holds the episodes that have no session yet; the caller starts them.
    """

    def __init__(self, *, group_size: int, run_seed: int) -> None:
        self._group_size = group_size
        self._run_seed = run_seed
        self._open: dict[str, Group] = {}
        self._blocks: dict[TaskBlock, int] = {}
        self.waiting: collections.deque[EpisodeSpec] = collections.deque()
        self.failures: collections.Counter[str] = collections.Counter()
        """Failed attempts by kind."""
        self.num_lost_episodes = 0
        """Members given up after `EPISODE_ATTEMPTS`."""
        self.num_dropped_groups = 0
        """Groups with fewer than two episodes left: they carry no signal and are not written."""
        self.num_episodes = 0
        self.num_successes = 0
        self.reward_sum = 0.0

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open_group(self, block: TaskBlock, task_index: int) -> None:
        """Line up the members of one task."""
        group_id = f"{block.epoch:08d}-{task_index:08d}"
        self._open[group_id] = Group(group_id, block, self._group_size)
        self._blocks.setdefault(block, block.stop - block.start)
        for member in range(self._group_size):
            self.waiting.append(
                EpisodeSpec(
                    group_id=group_id,
                    group_size=self._group_size,
                    member=member,
                    task_id=str(task_index),
                    task_seed=task_seed("train", task_index, self._run_seed),
                )
            )

    def take(self, spec: EpisodeSpec, outcome: Trajectory | EpisodeFailed) -> Group | None:
        """Take in one episode's outcome; the group, if that closed it (see `Group.trajectories`)."""
        group = self._open[spec.group_id]
        if isinstance(outcome, EpisodeFailed):
            self.failures[outcome.kind] += 1
            if spec.attempt + 1 < EPISODE_ATTEMPTS:
                # In front: the group's other members must not wait for a whole round.
                self.waiting.appendleft(dataclasses.replace(spec, attempt=spec.attempt + 1))
                return None
            group.num_lost += 1
            self.num_lost_episodes += 1
        else:
            group.trajectories.append(outcome)
            self.num_episodes += 1
            self.reward_sum += outcome.reward
            self.num_successes += outcome.reward >= 1.0
        if not group.is_closed:
            return None
        del self._open[spec.group_id]
        if len(group.trajectories) < MIN_EPISODES:
            self.num_dropped_groups += 1
        return group

    def settle(self, group: Group) -> bool:
        """A closed group is in a shard, or dropped; true when that was the last one of its block."""
        left = self._blocks[group.block] - 1
        if left:
            self._blocks[group.block] = left
            return False
        del self._blocks[group.block]
        return True

"""Groups under way: which members are still to play, which have delivered, which are lost. No I/O, no clock.

A group closes with its last member, or at its deadline with what it has: a member that hangs or fails again and
again costs its group that member and no more. Times are passed in, in seconds of any one clock.
"""

from __future__ import annotations

import collections
import dataclasses

from tunix_core.actor.episodes import Episode, EpisodeFailed, EpisodeSpec, Outcome
from tunix_core.environments import task_seed
from tunix_core.storage.task_blocks import TaskBlock
from tunix_core.types import Trajectory

EPISODE_ATTEMPTS = 3
"""How often a member is tried before its group goes on without it."""

MIN_EPISODES = 2
"""A group-relative advantage needs as many."""

MAX_KINDS = 64
"""Of failures, counted apart: user code can name its exceptions as it likes."""

_BYTES_PER_TOKEN = 13
"""Of a trajectory's columns, before compression."""


@dataclasses.dataclass
class Group:
    """The G episodes of one task instance."""

    group_id: str
    block: TaskBlock
    size: int
    deadline: float
    episodes: list[Episode] = dataclasses.field(default_factory=list)
    num_lost: int = 0

    @property
    def is_closed(self) -> bool:
        return len(self.episodes) + self.num_lost == self.size

    @property
    def is_worth_writing(self) -> bool:
        return len(self.episodes) >= MIN_EPISODES

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for episode in self.episodes for trajectory in episode]

    @property
    def num_bytes(self) -> int:
        """About what it takes in a shard, before compression."""
        return sum(_BYTES_PER_TOKEN * row.num_tokens + len(row.messages) for row in self.trajectories)


class GroupBook:
    """Makes episodes of tasks, and groups of episodes.

    `waiting` holds the episodes that have no session yet; the caller starts them.
    """

    def __init__(self, *, group_size: int, run_seed: int, group_seconds: float) -> None:
        self._group_size = group_size
        self._run_seed = run_seed
        self._group_seconds = group_seconds
        self._open: dict[str, Group] = {}
        self._blocks: dict[TaskBlock, int] = {}
        self.waiting: collections.deque[EpisodeSpec] = collections.deque()
        self.failures: collections.Counter[str] = collections.Counter()
        """Failed attempts by kind."""
        self.finish_reasons: collections.Counter[str] = collections.Counter()
        """Delivered episodes by how they ended."""
        self.num_lost_episodes = 0
        """Members given up: after `EPISODE_ATTEMPTS`, or at their group's deadline."""
        self.num_late_groups = 0
        """Groups closed at their deadline."""
        self.num_dropped_groups = 0
        """Groups with fewer than two episodes left: they carry no signal and are not written."""
        self.num_dropped_in_a_row = 0
        self.num_closed_groups = 0
        self.num_episodes = 0
        self.num_successes = 0
        self.reward_sum = 0.0

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open_group(self, block: TaskBlock, task_index: int, now: float) -> None:
        """Line up the members of one task."""
        group_id = f"{block.epoch:08d}-{task_index:08d}"
        self._open[group_id] = Group(group_id, block, self._group_size, now + self._group_seconds)
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

    def take(self, spec: EpisodeSpec, outcome: Outcome) -> Group | None:
        """Take in one episode's outcome; the group, if that closed it (see `Group.is_worth_writing`)."""
        group = self._open.get(spec.group_id)
        if group is None:
            return None  # it ended in the very moment of its group's deadline, which counted it
        if isinstance(outcome, EpisodeFailed):
            self._count_failure(outcome.kind)
            if outcome.retryable and spec.attempt + 1 < EPISODE_ATTEMPTS:
                # In front: the group's other members must not wait for a whole round.
                self.waiting.appendleft(dataclasses.replace(spec, attempt=spec.attempt + 1))
                return None
            group.num_lost += 1
            self.num_lost_episodes += 1
        else:
            group.episodes.append(outcome)
            self._count_episode(outcome)
        return self._close(group) if group.is_closed else None

    def expire(self, now: float) -> list[Group]:
        """Close the groups whose time is up; the caller ends their sessions."""
        late = [group for group in self._open.values() if now >= group.deadline]
        for group in late:
            missing = group.size - len(group.episodes) - group.num_lost
            self._count_failure("group_timeout", missing)
            group.num_lost += missing
            self.num_lost_episodes += missing
            self.num_late_groups += 1
            self._close(group)
        if late:
            gone = {group.group_id for group in late}
            self.waiting = collections.deque(spec for spec in self.waiting if spec.group_id not in gone)
        return late

    def settle(self, group: Group) -> bool:
        """A closed group is in a shard, or dropped; true when that was the last one of its block."""
        left = self._blocks[group.block] - 1
        if left:
            self._blocks[group.block] = left
            return False
        del self._blocks[group.block]
        return True

    def _close(self, group: Group) -> Group:
        del self._open[group.group_id]
        self.num_closed_groups += 1
        self.num_dropped_groups += not group.is_worth_writing
        self.num_dropped_in_a_row = 0 if group.is_worth_writing else self.num_dropped_in_a_row + 1
        return group

    def _count_failure(self, kind: str, count: int = 1) -> None:
        known = kind in self.failures or len(self.failures) < MAX_KINDS
        self.failures[kind if known else "other"] += count

    def _count_episode(self, episode: Episode) -> None:
        last = episode[-1]
        self.num_episodes += 1
        self.reward_sum += last.reward
        self.num_successes += last.reward >= 1.0
        self.finish_reasons[last.finish_reason] += 1


class Outgoing:
    """Closed groups on their way into shards: cut by number, by size and by time."""

    def __init__(self, *, max_groups: int, max_bytes: int, flush_seconds: float) -> None:
        self._max_groups = max_groups
        self._max_bytes = max_bytes
        self._flush_seconds = flush_seconds
        self._waiting: list[tuple[Group, int, float]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, group: Group, now: float) -> None:
        self._waiting.append((group, group.num_bytes, now))

    def take(self, now: float) -> list[Group]:
        """One shard's groups where it is full or its oldest has waited long enough, else none."""
        num_groups = self._num_full()
        if not num_groups and self._waiting and now - self._waiting[0][2] >= self._flush_seconds:
            num_groups = len(self._waiting)
        return self._cut(num_groups)

    def take_rest(self) -> list[Group]:
        """One shard's groups, full or not; none when nothing is left."""
        return self._cut(self._num_full() or len(self._waiting))

    def _num_full(self) -> int:
        """Leading groups that fill a shard; 0 while they do not. A group above the limit has a shard of its own."""
        num_bytes = 0
        for place, (_, size, _) in enumerate(self._waiting):
            num_bytes += size
            if place and num_bytes > self._max_bytes:
                return place
            if place + 1 == self._max_groups or num_bytes >= self._max_bytes:
                return place + 1
        return 0

    def _cut(self, num_groups: int) -> list[Group]:
        taken, self._waiting = self._waiting[:num_groups], self._waiting[num_groups:]
        return [group for group, _, _ in taken]

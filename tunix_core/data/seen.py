"""Which trajectories have been read: what makes delivery twice harmless.

Ids and content hashes are kept as 64-bit digests, 16 bytes a trajectory in a checkpoint. With a
million trajectories the chance of any collision is 3e-8, and its cost is one trajectory counted as
duplicate or quarantined, never one trained on twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np


def digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class SeenTrajectories:
    """Trajectory id -> content; group -> the incarnation that delivered it first."""

    def __init__(self) -> None:
        self._content: dict[int, int] = {}
        self._groups: dict[int, int] = {}
        self._num_restored = 0
        """The first of `_content`."""
        self._common: set[int] = set()
        """Groups that every feed knows, or will."""

    def add(self, trajectory_id: str, content_hash: str) -> None:
        self._content[digest(trajectory_id)] = digest(content_hash)

    def add_group(self, group_id: str, incarnation: str) -> None:
        self._groups.setdefault(digest(group_id), digest(incarnation))

    def add_common(self, group: int, incarnation: int) -> None:
        """Digests of a group that another feed has delivered: from now on it is that one's."""
        self._groups[group] = incarnation
        self._common.add(group)

    def groups(self, chosen: Iterable[int]) -> list[tuple[int, int]]:
        """(group, incarnation) of these digests."""
        return [(group, self._groups[group]) for group in chosen]

    def has_group(self, group_id: str) -> bool:
        return digest(group_id) in self._groups

    def is_reissued(self, group_id: str, incarnation: str) -> bool:
        """Whether another incarnation has delivered this group."""
        first = self._groups.get(digest(group_id))
        return first is not None and first != digest(incarnation)

    def check(self, trajectory_id: str, content_hash: str) -> Literal["new", "same", "other"]:
        """`same`: delivered before with equal content; `other`: the id is taken by other content."""
        known = self._content.get(digest(trajectory_id))
        if known is None:
            return "new"
        return "same" if known == digest(content_hash) else "other"

    def arrays(self, feed: int = 0, num_feeds: int = 1) -> dict[str, np.ndarray]:
        """For a checkpoint: `seen_ids` and `seen_contents` uint64 [N], `seen_groups` and `seen_writers` uint64 [M].

        What all feeds know, one of them saves; together they save everything.
        """
        contents = [
            item
            for place, item in enumerate(self._content.items())
            if place >= self._num_restored or item[0] % num_feeds == feed
        ]
        groups = [item for item in self._groups.items() if item[0] not in self._common or item[0] % num_feeds == feed]
        return {
            "seen_ids": np.array([item[0] for item in contents], np.uint64),
            "seen_contents": np.array([item[1] for item in contents], np.uint64),
            "seen_groups": np.array([item[0] for item in groups], np.uint64),
            "seen_writers": np.array([item[1] for item in groups], np.uint64),
        }

    @classmethod
    def restore(cls, arrays: Mapping[str, np.ndarray]) -> SeenTrajectories:
        """The inverse of `arrays`; those of several feeds one after another."""
        seen = cls()
        seen._content = dict(zip(arrays["seen_ids"].tolist(), arrays["seen_contents"].tolist(), strict=True))
        seen._groups = dict(zip(arrays["seen_groups"].tolist(), arrays["seen_writers"].tolist(), strict=True))
        seen._num_restored = len(seen._content)
        seen._common = set(seen._groups)
        return seen

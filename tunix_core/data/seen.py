"""Which trajectories have been read: what makes delivery twice harmless.

Ids and content hashes are kept as 64-bit digests, 16 bytes a trajectory in a checkpoint. With a
million trajectories the chance of any collision is 3e-8, and its cost is one trajectory counted as
duplicate or quarantined, never one trained on twice.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import numpy as np


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class SeenTrajectories:
    """Trajectory id -> content; group -> the incarnation that delivered it first."""

    def __init__(self) -> None:
        self._content: dict[int, int] = {}
        self._groups: dict[int, int] = {}

    def add(self, trajectory_id: str, content_hash: str) -> None:
        self._content[_digest(trajectory_id)] = _digest(content_hash)

    def add_group(self, group_id: str, incarnation: str) -> None:
        self._groups.setdefault(_digest(group_id), _digest(incarnation))

    def has_group(self, group_id: str) -> bool:
        return _digest(group_id) in self._groups

    def is_reissued(self, group_id: str, incarnation: str) -> bool:
        """Whether another incarnation has delivered this group."""
        first = self._groups.get(_digest(group_id))
        return first is not None and first != _digest(incarnation)

    def check(self, trajectory_id: str, content_hash: str) -> Literal["new", "same", "other"]:
        """`same`: delivered before with equal content; `other`: the id is taken by other content."""
        known = self._content.get(_digest(trajectory_id))
        if known is None:
            return "new"
        return "same" if known == _digest(content_hash) else "other"

    def arrays(self) -> dict[str, np.ndarray]:
        """For a checkpoint: `seen_ids` and `seen_contents` uint64 [N], `seen_groups` and `seen_writers` uint64 [M]."""
        return {
            "seen_ids": np.fromiter(self._content.keys(), np.uint64, len(self._content)),
            "seen_contents": np.fromiter(self._content.values(), np.uint64, len(self._content)),
            "seen_groups": np.fromiter(self._groups.keys(), np.uint64, len(self._groups)),
            "seen_writers": np.fromiter(self._groups.values(), np.uint64, len(self._groups)),
        }

    @classmethod
    def restore(cls, arrays: dict[str, np.ndarray]) -> SeenTrajectories:
        """The inverse of `arrays`."""
        seen = cls()
        seen._content = dict(zip(arrays["seen_ids"].tolist(), arrays["seen_contents"].tolist(), strict=True))
        seen._groups = dict(zip(arrays["seen_groups"].tolist(), arrays["seen_writers"].tolist(), strict=True))
        return seen

"""User ids for sandboxes: root gives each one that no other process of the machine has.

RLIMIT_NPROC does nothing for uid 0, and one user's processes could signal each other. Whoever is not
root cannot change its id, and need not: the limit then counts within each sandbox's user namespace.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from tunix_core.sandbox.launch import SandboxUnavailable

_FIRST = 0x40000000
_PER_PROCESS = 256
_taken: set[int] = set()
"""By this process; a pid is below 2^22, so no other process has one of ours."""


class Identities:
    def __init__(self) -> None:
        self._own = os.geteuid()

    @property
    def description(self) -> str:
        return "a user id per sandbox" if self._own == 0 else f"user id {self._own} for all sandboxes"

    def take(self) -> int | None:
        """A free one; None for a process that is not root.

        Raises:
            SandboxUnavailable: root of a user namespace without those ids, or too many sandboxes.
        """
        if self._own != 0:
            return None
        first = _FIRST + os.getpid() * _PER_PROCESS
        for uid in itertools.islice(itertools.count(first), _PER_PROCESS):
            if uid not in _taken:
                _check_mapped(uid)
                _taken.add(uid)
                return uid
        raise SandboxUnavailable("num_slots", f"{_PER_PROCESS} in use", f"up to {_PER_PROCESS}", "Close a pool.")

    def give_back(self, uid: int | None) -> None:
        _taken.discard(-1 if uid is None else uid)


def _check_mapped(uid: int) -> None:
    extents = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    if not any(first <= uid < first + count for first, _, count in extents):
        raise SandboxUnavailable(
            "sandbox",
            f"root of a user namespace that maps {extents}",
            f"user ids from {_FIRST} on, or an ordinary user",
            "Run the actor as an ordinary user of the container.",
        )

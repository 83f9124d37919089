"""Where every token that was read went, exact to the token.

    read = consumed + stale + duplicate + quarantined + filtered + overlong + surplus + buffered

holds after every operation, for tokens and for trajectories. Beside it stand what was trained on
more than once (`reused`) and the shards that could not be read at all, by shard and bytes: what
is in them is unknown, so they cannot be counted in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunix_core.errors import CorruptObject
from tunix_core.types import LEDGER_CLASSES

_UNITS = ("tokens", "trajectories")


class Ledger:
    """Counts by class. Not thread-safe: the buffer that owns it holds its lock."""

    def __init__(self) -> None:
        self.read = dict.fromkeys(_UNITS, 0)
        self.reused = dict.fromkeys(_UNITS, 0)
        self.classes = {name: dict.fromkeys(_UNITS, 0) for name in LEDGER_CLASSES}
        self.unreadable: dict[str, int] = {}
        """Shard -> bytes."""

    def receive(self, name: str, lengths: np.ndarray) -> None:
        """Trajectories of the given lengths were read and go to the class `name`.

        Args:
            name: one of `LEDGER_CLASSES`.
            lengths: [N] tokens of each trajectory, all of them, not the policy's alone.
        """
        self._add(self.read, lengths, 1)
        self._add(self.classes[name], lengths, 1)

    def move(self, source: str, target: str, lengths: np.ndarray) -> None:
        """Trajectories counted in `source` now belong to `target`."""
        self._add(self.classes[source], lengths, -1)
        self._add(self.classes[target], lengths, 1)
        assert self.classes[source]["tokens"] >= 0, f"ledger: class {source} fell below zero"

    def withdraw(self, name: str) -> None:
        """Count as unread what is in a class: another ledger takes it over."""
        for unit in _UNITS:
            self.read[unit] -= self.classes[name][unit]
            self.classes[name][unit] = 0

    def reuse(self, lengths: np.ndarray) -> None:
        """Trajectories already consumed were trained on once more."""
        self._add(self.reused, lengths, 1)

    def refuse_shard(self, shard: str, num_bytes: int) -> None:
        self.unreadable[shard] = int(num_bytes)

    @staticmethod
    def _add(counts: dict[str, int], lengths: np.ndarray, sign: int) -> None:
        counts["tokens"] += sign * int(np.sum(lengths))
        counts["trajectories"] += sign * len(lengths)

    @property
    def balanced(self) -> bool:
        """Whether the identity holds; anything but True is a bug."""
        return all(self.read[u] == sum(counts[u] for counts in self.classes.values()) for u in _UNITS)

    def tokens(self) -> dict[str, int]:
        """`read` and every class in tokens: the form in heartbeats, metrics and reports."""
        return {"read": self.read["tokens"]} | {name: counts["tokens"] for name, counts in self.classes.items()}

    def trajectories(self) -> dict[str, int]:
        """The same in trajectories."""
        return {"read": self.read["trajectories"]} | {n: counts["trajectories"] for n, counts in self.classes.items()}

    def state(self) -> dict[str, Any]:
        """JSON values from which `restore` makes an equal ledger."""
        return {
            "read": dict(self.read),
            "reused": dict(self.reused),
            "classes": {name: dict(counts) for name, counts in self.classes.items()},
            "unreadable": dict(self.unreadable),
        }

    @classmethod
    def total(cls, states: Sequence[Mapping[str, Any]]) -> Ledger:
        """Of several ledgers, from their `state()`."""
        ledger = cls()
        for state in states:
            for unit in _UNITS:
                ledger.read[unit] += state["read"][unit]
                ledger.reused[unit] += state["reused"][unit]
                for name, counts in state["classes"].items():
                    ledger.classes[name][unit] += counts[unit]
            ledger.unreadable.update(state["unreadable"])
        return ledger

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Ledger:
        """The inverse of `state`.

        Raises:
            CorruptObject: the classes do not add up to what was read.
        """
        ledger = cls()
        ledger.read.update(state["read"])
        ledger.reused.update(state["reused"])
        for name, counts in state["classes"].items():
            ledger.classes[name].update(counts)
        ledger.unreadable.update(state["unreadable"])
        if not ledger.balanced:
            raise CorruptObject(f"ledger: received {ledger.tokens()}, accepted classes that add up to `read`")
        return ledger

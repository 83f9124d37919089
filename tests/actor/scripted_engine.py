"""An engine whose messages follow a script: the protocol without a model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tunix_core.actor.policy_engine import EngineCounters, Request, Transcripts, TurnEnd, TurnReason

Script = Callable[[random.Random], list[int]]
"""A policy message, its end of turn included where it has one; the generator's seed is the request's key."""


class ScriptedEngine:
    """A `PolicyEngine`: every advance draws up to `tokens_per_advance` tokens in each slot that speaks.

    Args:
        end_of_turn: by which a message is complete.
        keeps_versions: an episode keeps the version it began with, as under the swap policy `finish`, and
            two versions may be resident.
        dies_after: dispatches after which `advance` raises.
        stop_id: a further id that ends a message.
    """

    def __init__(
        self,
        script: Script,
        *,
        num_slots: int,
        end_of_turn: int,
        context_tokens: int = 4096,
        tokens_per_advance: int = 8,
        version: int = 0,
        keeps_versions: bool = False,
        dies_after: int = 0,
        stop_id: int = -1,
    ) -> None:
        self.context_tokens = context_tokens
        self.transcripts = Transcripts(num_slots, context_tokens)
        self.counters = EngineCounters()
        self.version = version
        self.most_parked = 0
        self.keys: list[tuple[int, ...]] = []
        """Of all requests."""
        self._script = script
        self._end_of_turn = end_of_turn
        self._tokens_per_advance = tokens_per_advance
        self._keeps_versions = keeps_versions
        self._dies_after = dies_after
        self._stop_id = stop_id
        self._num_advances = 0
        self._free = set(range(num_slots))
        self._random: dict[int, random.Random] = {}
        self._versions: dict[int, int] = {}
        self._left: dict[int, list[int]] = {}
        self._start: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_parked(self) -> int:
        return len(self.transcripts.lengths) - len(self._free) - len(self._left)

    @property
    def busy(self) -> bool:
        return bool(self._left)

    async def start(self) -> None:
        """Ready when it is made."""

    def acquire(self, request: Request) -> int:
        slot = min(self._free)
        self._free.remove(slot)
        self.transcripts.clear(slot)
        self._random[slot] = random.Random(request.key.tobytes())
        self._versions[slot] = self.version
        self.keys.append(tuple(request.key.tolist()))
        return slot

    def release(self, slot: int) -> None:
        assert slot not in self._free, "released twice"
        self._left.pop(slot, None)
        self._free.add(slot)

    def room(self, slot: int) -> int:
        return self.context_tokens - int(self.transcripts.lengths[slot]) - 1

    def begin_turn(self, slot: int, ids: list[int]) -> None:
        assert slot not in self._free
        assert slot not in self._left
        assert 0 < len(ids) <= self.room(slot)
        for token in ids:
            self._append(slot, token)
        self._start[slot] = int(self.transcripts.lengths[slot])
        message = self._script(self._random[slot])
        self._left[slot] = message[: self.room(slot) + 1]

    async def advance(self) -> list[TurnEnd]:
        self._num_advances += 1
        if self._num_advances == self._dies_after:
            raise RuntimeError("scripted crash")
        self.most_parked = max(self.most_parked, self.num_parked)
        ended = []
        for slot in sorted(self._left):
            drawn = self._left[slot][: self._tokens_per_advance]
            del self._left[slot][: self._tokens_per_advance]
            for token in drawn:
                self._append(slot, token, version=self._versions[slot])
            self.counters.policy_tokens += len(drawn)
            if not self._left[slot]:
                del self._left[slot]
                end = int(self.transcripts.lengths[slot])
                last = int(self.transcripts.tokens[slot, end - 1])
                reason: TurnReason = "stop_id" if last == self._stop_id else ""
                ended.append(TurnEnd(slot, self._start[slot], end, last == self._end_of_turn, reason=reason))
        return ended

    def can_swap(self) -> bool:
        taken = set(range(len(self.transcripts.lengths))) - self._free
        return not self._keeps_versions or all(self._versions[slot] == self.version for slot in taken)

    def swap(self, weights: Any, version: int) -> None:
        del weights
        assert self.can_swap()
        self.version = version
        self.counters.swaps += 1
        if not self._keeps_versions:
            self._versions = dict.fromkeys(self._versions, version)

    async def close(self) -> None:
        """Holds nothing."""

    def _append(self, slot: int, token: int, version: int | None = None) -> None:
        at = slot, int(self.transcripts.lengths[slot])
        self.transcripts.tokens[at] = token
        if version is not None:
            self.transcripts.loss_mask[at] = True
            self.transcripts.logprobs[at] = -1.0
            self.transcripts.versions[at] = version
        self.transcripts.lengths[slot] += 1

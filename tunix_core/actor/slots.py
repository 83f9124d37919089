"""What the engine knows of its slots besides their transcripts."""

from __future__ import annotations

import jax
import numpy as np

from tunix_core.actor.policy_engine import NO_VERSION, Request, Transcripts
from tunix_core.actor.sampling import Draws, Kind, Limits
from tunix_core.actor.stopping import StopScanner
from tunix_core.errors import ConfigError

FREE, PARKED, PREFILL, DECODE = range(4)
"""Nobody's; its environment has the word; tokens to read before it may speak; it speaks."""


class Slots:
    """N slots, one array element each."""

    def __init__(self, num_slots: int, context_tokens: int, kind: Kind) -> None:
        self.transcripts = Transcripts(num_slots, context_tokens)
        self.state = np.full(num_slots, FREE, np.int8)
        self.cached = np.zeros(num_slots, np.int32)
        """Leading tokens whose cache entries are valid under `cache_version`."""
        self.cache_version = np.full(num_slots, NO_VERSION, np.int32)
        self.pinned = np.full(num_slots, NO_VERSION, np.int32)
        """The version that a conversation stays with, under swap policy `finish`."""
        self.turn_start = np.zeros(num_slots, np.int32)
        self.turn_limit = np.zeros(num_slots, np.int32)
        self.arrival = np.zeros(num_slots, np.int64)
        """Rises with each turn: who came first."""
        self.waits = np.zeros(num_slots, np.int32)
        """How often a speaking slot was passed over since it last decoded."""
        self.scanners: dict[int, StopScanner] = {}
        """Of turns that a stop string may end."""
        self.stop_strings: list[tuple[str, ...]] = [()] * num_slots
        self._kind = kind
        self._turns = 0
        self._released = np.zeros(num_slots, np.int64)
        limits = Limits(
            greedy=np.zeros(num_slots, bool),
            top_k=np.zeros(num_slots, np.int32),
            top_p=np.ones(num_slots, np.float32),
            min_p=np.zeros(num_slots, np.float32),
        )
        self._draws = Draws(
            keys=np.zeros((num_slots, 2), np.uint32),
            temperatures=np.ones(num_slots, np.float32),
            limits=limits if kind == "any" else None,
        )

    def take(self, request: Request) -> int:
        """A free slot for a conversation: the one given back longest ago, whose entries others need least."""
        _check_kind(request, self._kind)
        free = np.flatnonzero(self.state == FREE)
        assert len(free) > 0, "acquire without a free slot"
        slot = int(free[np.argmin(self._released[free])])
        self.state[slot] = PARKED
        self.transcripts.clear(slot)
        self.cached[slot] = 0
        self.cache_version[slot] = self.pinned[slot] = NO_VERSION
        self.stop_strings[slot] = request.stop_strings
        self._draws.keys[slot] = request.key
        self._draws.temperatures[slot] = request.temperature
        if self._draws.limits is not None:
            for name, values in self._draws.limits._asdict().items():
                values[slot] = getattr(request, name)
        return slot

    def give_back(self, slot: int) -> None:
        self._turns += 1
        self._released[slot] = self._turns
        self.state[slot] = FREE
        self.scanners.pop(slot, None)

    def begin_turn(self, slot: int, ids: list[int], max_tokens: int) -> None:
        transcripts = self.transcripts
        start = int(transcripts.lengths[slot])
        end = start + len(ids)
        transcripts.tokens[slot, start:end] = ids
        transcripts.lengths[slot] = self.turn_start[slot] = end
        self.turn_limit[slot] = min(end + max_tokens, transcripts.tokens.shape[1])
        self._turns += 1
        self.arrival[slot] = self._turns
        self.waits[slot] = 0
        self.state[slot] = PREFILL

    def pending(self) -> np.ndarray:
        """Slots with tokens to read, first come first."""
        slots = np.flatnonzero(self.state == PREFILL)
        return slots[np.argsort(self.arrival[slots], kind="stable")]

    def draws(self, slots: np.ndarray) -> Draws:
        """How the tokens of `slots` are drawn."""
        draws: Draws = jax.tree.map(lambda values: values[slots], self._draws)
        return draws


def _check_kind(request: Request, kind: Kind) -> None:
    if kind == "any" or ((kind == "greedy") == request.greedy and not request.truncated):
        return
    received = ", ".join(f"{name}={getattr(request, name)}" for name in ("greedy", "top_k", "top_p", "min_p"))
    accepted = "the temperature alone" if kind == "temperature" else "greedy requests alone"
    raise ConfigError("request", received, f"{accepted}, by this engine", "Truncated sampling is for evaluation.")

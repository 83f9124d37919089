"""What an actor asks of anything that generates: conversations in slots, turns, weights by version.

Two kinds of engine implement it, one that decodes here (`engine`) and one that asks a server; one
suite of tests holds for both. A slot holds one conversation, which only grows: what the environment
says is appended with `begin_turn`, what the policy says comes back as a `TurnEnd`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from tunix_core.validation import check_sampling, check_stop_string

NO_VERSION = -1
"""Of a token that no policy drew."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """How one conversation is sampled.

    What lies below the temperature is for evaluation: an engine that serves training refuses it. A
    recorded log-probability is that of the distribution really drawn from, renormalised after what was
    cut off; a greedy token's is that of the whole distribution at temperature 1.
    """

    key: np.ndarray  # uint32 [2]
    """Its draws follow from this key and the tokens' positions alone; see `sampling.request_key`."""
    temperature: float = 1.0
    greedy: bool = False
    """Always the likeliest token; the others have no say then."""
    top_k: int = 0
    """Only the likeliest so many; 0: all. Whatever is as likely as the last of them stays too."""
    top_p: float = 1.0
    """Then the likeliest that have so much of the remaining probability together; ties as above."""
    min_p: float = 0.0
    """And none whose probability is below so much of the likeliest one's."""
    stop_strings: tuple[str, ...] = ()
    """Further texts that end a turn; tokens up to the one that completes the first of them are kept."""

    def __post_init__(self) -> None:
        check_sampling("request", self)
        for text in self.stop_strings:
            check_stop_string("request.stop_strings", text)

    @property
    def truncated(self) -> bool:
        """Whether some tokens can never be drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


TurnReason = Literal["end_of_turn", "stop_id", "stop_string", "turn_limit", "context", ""]
"""Why a turn ended: its end of turn, another stop id, a stop string, its limit of tokens, the end of the
context; empty where an engine knows no more than `TurnEnd.stopped` says."""


class TurnEnd(NamedTuple):
    """A policy message: tokens `[start, end)` of its slot."""

    slot: int
    start: int
    end: int
    stopped: bool
    """True when the policy ended it with its end of turn, the last token; false at a limit."""
    failure: str = ""
    """The kind under which a message that could not be generated is counted; it has no tokens."""
    reason: TurnReason = ""


class Conversation(NamedTuple):
    """A slot's T tokens so far; copies, aligned as in `Trajectory`."""

    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    logprobs: np.ndarray  # float32 [T]
    versions: np.ndarray  # int32 [T]


class EngineCounters:
    """What an engine has done so far; read by metrics."""

    def __init__(self) -> None:
        self.policy_tokens = 0
        self.prefill_tokens = 0
        self.recomputed_tokens = 0
        """Tokens read again because their cache entries had an older version's values."""
        self.shared_tokens = 0
        """Tokens whose cache entries were copied from another conversation instead of being read."""
        self.discarded_tokens = 0
        """Tokens drawn behind a stop string, before it was seen; in no transcript."""
        self.swaps = 0
        self.swap_seconds = 0.0
        self.extend_dispatches = 0
        self.decode_dispatches = 0
        self.decode_rows = 0
        """Tokens that decode dispatches had room for: their rows, empty ones included, times their steps."""
        self.decode_live_rows = 0
        """… and how many of them were drawn and kept."""
        self.extend_seconds = 0.0
        self.decode_seconds = 0.0
        self.of_kind: dict[str, float] = {}
        """Figures that only this kind of engine has, by metric name."""
        self.alarms: list[str] = []
        """Lines that a person must see, oldest first."""


class Transcripts:
    """The tokens of N slots of S places each, and what is known of them; every engine keeps its own."""

    def __init__(self, num_slots: int, context_tokens: int) -> None:
        shape = (num_slots, context_tokens)
        self.tokens = np.zeros(shape, np.int32)
        self.loss_mask = np.zeros(shape, bool)
        self.logprobs = np.zeros(shape, np.float32)
        self.versions = np.full(shape, NO_VERSION, np.int32)
        self.lengths = np.zeros(num_slots, np.int32)

    def clear(self, slot: int) -> None:
        self.lengths[slot] = 0
        self.loss_mask[slot] = False
        self.logprobs[slot] = 0
        self.versions[slot] = NO_VERSION

    def conversation(self, slot: int) -> Conversation:
        length = int(self.lengths[slot])
        arrays = (self.tokens, self.loss_mask, self.logprobs, self.versions)
        return Conversation(*(array[slot, :length].copy() for array in arrays))


class PolicyEngine(Protocol):
    """N slots. Not thread-safe: one event loop owns it."""

    context_tokens: int
    transcripts: Transcripts
    version: int
    """Version that turns start with."""
    counters: EngineCounters

    async def start(self) -> None:
        """Returns once turns can be generated, within the loop that owns it, or raises why not."""
        ...

    @property
    def num_free(self) -> int: ...

    @property
    def num_parked(self) -> int:
        """Slots whose environment has the word."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a turn is under way, so that `advance` has something to do."""
        ...

    def acquire(self, request: Request) -> int:
        """Take a free slot for a conversation."""
        ...

    def release(self, slot: int) -> None:
        """Give a slot back, in whatever state its conversation is."""
        ...

    def room(self, slot: int) -> int:
        """Tokens that still fit, one place for an answer kept."""
        ...

    def begin_turn(self, slot: int, ids: list[int], max_tokens: int | None = None) -> None:
        """Append what the environment said and let the policy speak.

        Args:
            slot: a parked one.
            ids: at least one token, at most `room(slot)`.
            max_tokens: of this turn, at least 1; the engine's own limit holds too.
        """
        ...

    async def advance(self) -> list[TurnEnd]:
        """Generate for a while; the turns that ended meanwhile, perhaps none."""
        ...

    def can_swap(self) -> bool:
        """Whether a further version may become resident now."""
        ...

    def swap(self, weights: Any, version: int) -> None:
        """Make `version` the one that turns start with; done when `self.version` says so.

        Args:
            weights: as the engine's kind takes them.
            version: above the present one.
        """
        ...

    async def close(self) -> None: ...

"""The actor pool: processes, slots, dispatch sizes, limits of an episode, weights in memory."""

from __future__ import annotations

import dataclasses
import typing
from typing import Literal

from tunix_core.validation import check_stop_string, require_choice, require_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """The pool: `num_groups` supervised groups of `replicas` processes each."""

    num_groups: int = 2
    replicas: int = 1
    min_actors: int = 1
    """A group's failure ends the run only when fewer processes than this are left."""
    num_slots: int = 64
    """Sessions that decode together; waiting sessions keep their slot and its KV cache."""
    context_tokens: int = 96
    max_turns: int = 4
    max_turn_tokens: int = 16
    decode_rows: int = 8
    decode_steps: int = 8
    """A decode dispatch draws up to `decode_steps` tokens for up to `decode_rows` sessions (at most
    `num_slots`), fewer once too many of them have ended. On CPU few rows waste least; an accelerator
    wants all slots in one dispatch."""
    prefill_rows: int = 8
    prefill_tokens: int = 8
    """Prefill runs in chunks of `[prefill_rows, prefill_tokens]`."""
    decode_row_sizes: int = 2
    prefill_row_sizes: int = 2
    prefill_token_sizes: int = 1
    context_sizes: int = 1
    """How many sizes of each are compiled: the one above, half of it, half of that (of prefill rows a
    quarter each time), and of the context that a dispatch reads. A dispatch takes the cheapest that
    fits; each combination costs a compilation at start, which long contexts and many slots repay."""
    prefill_dispatches: int = 4
    """At most so many between two decodes: a long prompt does not hold up the turns of others."""
    shared_prefix_tokens: int = 8
    """A conversation that begins with at least so many tokens that another slot has in its cache copies
    them from there; 0: each reads its own."""
    stop_ids: tuple[int, ...] = ()
    """Further tokens that end a turn, beside the tokenizer's end of turn."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a turn, with the token that completes one of them."""
    flush_seconds: float = 0.5
    max_groups_per_shard: int = 16
    task_block_size: int = 64
    swap_policy: Literal["turn", "immediate", "finish"] = "turn"
    """When a conversation takes newer weights: at its next turn, at once, or never."""
    max_resident_versions: int = 2
    """Sets of weights in memory: a swap waits, and the newest is the one it waits for, until one of them is free."""
    min_swap_seconds: float = 0.5
    poll_seconds: float = 0.25
    """How often the pacing signal and the policy pointer are read."""
    max_restarts: int = 5
    """Restarts per replica without progress in between."""
    max_forks: int = 0
    """Further trajectories of an episode whose chat template rewrites earlier turns. The learner reckons with as many, so
    0 refuses such templates."""
    episode_timeout_seconds: float = 600.0
    """After it an episode gets no further turn; one whose policy still speaks has failed."""
    group_timeout_seconds: float = 1200.0
    """A group closes with the episodes it has then, two at least; a hanging member is counted, not waited for."""
    drain_seconds: float = 2.0
    """After a signal, for groups that are nearly complete. What is left is played again by whoever takes up its tasks."""
    max_shard_bytes: int = 32 * 2**20
    """Of a shard's groups before compression."""
    max_observation_bytes: int = 65_536
    """Of an environment's answer; what is longer is cut and counted, a longer question fails."""
    max_abandoned_calls: int = 64
    """Environment calls that ignore their deadline, each perhaps with a thread; the process ends and begins anew there."""

    def __post_init__(self) -> None:
        for field in (
            "num_groups",
            "replicas",
            "min_actors",
            "num_slots",
            "max_turns",
            "max_turn_tokens",
            "decode_rows",
            "decode_steps",
            "prefill_rows",
            "prefill_tokens",
            "prefill_dispatches",
            "max_groups_per_shard",
            "task_block_size",
        ):
            require_range(f"actor.{field}", getattr(self, field), 1)
        require_range("actor.context_tokens", self.context_tokens, 16)
        for field in ("flush_seconds", "min_swap_seconds", "poll_seconds"):
            require_range(f"actor.{field}", getattr(self, field), 0.01, 3600)
        require_range("actor.max_forks", self.max_forks, 0, self.max_turns - 1, "Every turn but the first can fork.")
        require_range("actor.episode_timeout_seconds", self.episode_timeout_seconds, 0.01)
        require_range(
            "actor.group_timeout_seconds",
            self.group_timeout_seconds,
            self.episode_timeout_seconds,
            remedy="A group lasts at least as long as an episode may (actor.episode_timeout_seconds).",
        )
        require_range("actor.drain_seconds", self.drain_seconds, 0, 5, "A process is killed 10 s after its signal.")
        require_range("actor.max_shard_bytes", self.max_shard_bytes, 2**10, 2**27, "Readers refuse what is far larger.")
        require_range("actor.max_observation_bytes", self.max_observation_bytes, 64)
        require_range("actor.max_abandoned_calls", self.max_abandoned_calls, 1, 10_000)
        require_range("actor.max_restarts", self.max_restarts, 0)
        for field in ("decode_row_sizes", "prefill_row_sizes", "prefill_token_sizes", "context_sizes"):
            require_range(f"actor.{field}", getattr(self, field), 1, 6)
        require_range("actor.shared_prefix_tokens", self.shared_prefix_tokens, 0)
        for token in self.stop_ids:
            require_range("actor.stop_ids", token, 0)
        for text in self.stop_strings:
            check_stop_string("actor.stop_strings", text)
        require_choice("actor.swap_policy", self.swap_policy, typing.get_type_hints(type(self))["swap_policy"])
        require_range(
            "actor.max_resident_versions",
            self.max_resident_versions,
            2,
            64,
            "While weights are changed both are there.",
        )

"""What an environment is, which tasks exist, and the latency and faults injected into tools."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from tunix_core.environment_config import EnvironmentConfig
from tunix_core.errors import ConfigError, EnvironmentFailure
from tunix_core.tokenizer import Framing, Tokenizer
from tunix_core.types import SPLITS

Instance = TypeVar("Instance")

_HELD_OUT_ONE_IN = 8
MAX_DRAWS = 256
"""For `draw_instance`. A held-out instance comes after 8 draws on average, so only a task with too few instances needs
as many."""


class Observation(NamedTuple):
    """What the policy reads first."""

    text: str
    instructions: str = ""
    """How to play, for policies that read: a chat template's system message."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Functions that may be called, as the JSON objects that chat templates take (`type`, `function`)."""
    without_tools: str = ""
    """With `tools`: the instructions with the tools in words, for templates that take none."""


class ToolCall(NamedTuple):
    """One call that a policy message made, for the record; what it returned is part of the observation."""

    name: str
    ok: bool


class StepResult(NamedTuple):
    """What came back for one policy message."""

    text: str
    """The observation; empty when the episode is over: nothing follows the last policy message."""
    reward: float
    """Of this message alone: an episode's reward is the sum over its messages."""
    done: bool
    tool_calls: Sequence[ToolCall] = ()
    """In the order of the message; several of one message run in parallel."""
    components: Mapping[str, float] = {}
    """Parts and counts behind the reward, over the episode so far."""
    truncated: bool = False
    """With `done`: a limit of the environment ended the episode, not the task."""
    role: Literal["tool", "user"] = "tool"
    """Whom a chat template lets say `text`: a tool, or a user where the text has the marks around results itself."""


class Environment(Protocol):
    """One episode at a time; `reset` starts the task that `seed` names.

    Seeded: everything that happens follows from `seed` and the messages. A message that is no valid
    call is an observation and a counted component, never an exception. `EnvironmentFailure` means
    that the environment itself broke: it costs this episode. A step may be cancelled at any await;
    `close` is called once, however the episode ended.
    """

    name: str

    async def reset(self, seed: int) -> Observation: ...

    async def step(self, message: str) -> StepResult: ...

    async def close(self) -> None: ...


class Demonstrated(Environment, Protocol):
    """An environment that can play its tasks itself: a warm start needs one."""

    def opening(self, seed: int) -> Observation:
        """What `reset` returns; starts nothing."""
        ...

    def demonstration(self, seed: int) -> list[tuple[str, str]]:
        """A perfect episode as `(role, text)`: prompt, policy, what came back (by its role, tool or user), policy, …"""
        ...


def opening_ids(tokenizer: Tokenizer, framing: Framing, first: Observation) -> list[int]:
    """The start of a sequence, up to where the policy speaks.

    Raises:
        DataError: the chat template does not take it.
    """
    if first.tools and not tokenizer.takes_tools:
        return framing.opening(first.without_tools, first.text)
    return framing.opening(first.instructions, first.text, first.tools)


def task_seed(split: str, index: int, run_seed: int) -> int:
    """Seed of task `index` of a split: 63 bits, of which the lowest tells the split.

    Raises:
        ConfigError: unknown split.
    """
    if split not in SPLITS:
        raise ConfigError("split", split, ", ".join(SPLITS), "Name one of the splits.")
    digest = hashlib.blake2b(f"{run_seed}/{split}/{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 2 << 1) | (split == "held_out")


def split_of(seed: int) -> str:
    """The split of a task seed."""
    return SPLITS[seed & 1]


def draw_instance(
    seed: int, draw: Callable[[random.Random], Instance], *, max_draws: int | None = None, too_few: str = ""
) -> Instance:
    """Draw the task instance of `seed`; the splits share no *instance*, not only no seed.

    An instance belongs to the held-out split when the checksum of its text is divisible by 8, so
    drawing goes on until one of the seed's split turns up.

    Args:
        max_draws: at most; None: as many as it takes, for draws that cost nothing from many instances.
        too_few: whose instances run out and what to do about it, for the error.

    Raises:
        EnvironmentFailure: none of `max_draws` was of the seed's split.
    """
    rng = random.Random(seed)
    held_out = split_of(seed) == "held_out"
    for _ in itertools.count() if max_draws is None else range(max_draws):
        instance = draw(rng)
        if (zlib.crc32(repr(instance).encode()) % _HELD_OUT_ONE_IN == 0) == held_out:
            return instance
    raise EnvironmentFailure(f"none of {max_draws} draws falls to the seed's split: {too_few}")


class ToolWeather:
    """Latency and faults of one episode's tool calls, from a seed of their own.

    A call takes lognormal time with mean `latency_mean_seconds`: location `log(mean) - sigma**2/2`.
    """

    def __init__(self, config: EnvironmentConfig, seed: int, *, latency: bool) -> None:
        self._rng = random.Random(seed)
        self._mean_seconds = config.latency_mean_seconds if latency else 0.0
        self._sigma = config.latency_sigma
        self._failure_probability = config.failure_probability

    async def call(self) -> None:
        """Wait as long as the tool takes.

        Raises:
            EnvironmentFailure: with `failure_probability`, after the wait.
        """
        # Drawn before the wait: calls that run at once would else draw in the order in which they end.
        seconds = 0.0
        if self._mean_seconds > 0:
            location = math.log(self._mean_seconds) - self._sigma**2 / 2
            seconds = self._rng.lognormvariate(location, self._sigma)
        fails = self._failure_probability > 0 and self._rng.random() < self._failure_probability
        if seconds:
            await asyncio.sleep(seconds)
        if fails:
            raise EnvironmentFailure("tool call: an injected fault (environment.failure_probability)")

"""One episode: an environment and a policy taking turns over one growing token sequence.

The policy's tokens, its end of turn included, are the ids it sampled; text is decoded from them for
the environment and for people only. What the environment says is framed by the tokenizer's marks and
is no policy token. Where the tokenizer's framing forks, the sequence so far becomes a trajectory of its own
and the episode goes on in another one.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol, TypeVar

from tunix_core.actor import answers
from tunix_core.actor.calls import Calls
from tunix_core.actor.episodes import Episode, EpisodeFailed, EpisodeSpec, Identity, Limits
from tunix_core.actor.policy_engine import Conversation, TurnEnd
from tunix_core.actor.recording import End, Recording, rows
from tunix_core.environments import Environment, StepResult
from tunix_core.environments.base import opening_ids
from tunix_core.errors import DataError
from tunix_core.tokenizer import Tokenizer

T = TypeVar("T")


class Seat(Protocol):
    """A session's place at the engine: one slot at a time."""

    @property
    def room(self) -> int:
        """Tokens that still fit, one place for an answer kept."""
        ...

    @property
    def capacity(self) -> int:
        """Tokens that an empty slot has room for."""
        ...

    async def speak(self, ids: list[int], seconds: float) -> TurnEnd:
        """Append `ids` and let the policy speak; returns when its turn is over.

        Raises:
            EpisodeFailed: it was not over in time.
        """
        ...

    def drawn(self, turn: TurnEnd) -> list[int]:
        """What the policy sampled, without its end of turn."""
        ...

    def conversation(self) -> Conversation: ...

    def fork(self) -> None:
        """Change to an empty slot."""
        ...


class SessionCounters:
    """Over all sessions of a process."""

    def __init__(self) -> None:
        self.num_cut_observations = 0
        self.num_forks = 0


class _Message(NamedTuple):
    """What the policy said."""

    turn: TurnEnd
    ids: list[int]  # without its end of turn
    text: str
    seconds: float


class Session:
    """`play` once.

    Args:
        make_environment: called within the first call's deadline.
        calls: through which everything of the environment goes.
    """

    def __init__(
        self,
        spec: EpisodeSpec,
        identity: Identity,
        limits: Limits,
        *,
        tokenizer: Tokenizer,
        make_environment: Callable[[], Environment],
        calls: Calls,
        seat: Seat,
        counters: SessionCounters,
    ) -> None:
        self.spec = spec
        self.started = time.monotonic()
        self._identity = identity
        self._limits = limits
        self._tokenizer = tokenizer
        self._make_environment = make_environment
        self._calls = calls
        self._seat = seat
        self._counters = counters
        self._framing = tokenizer.framing()
        self._environment: Environment | None = None
        self._recordings: list[Recording] = []

    async def play(self) -> Episode:
        """The episode's trajectories.

        Raises:
            EpisodeFailed: the environment broke or ran past a deadline, or the engine gave no message.
        """
        ids = await self._open()
        reward, num_turns = 0.0, 0
        components: Mapping[str, float] = {}
        while True:
            message = await self._speak(ids)
            num_turns += 1
            if not (message.turn.stopped or message.turn.reason in ("stop_id", "stop_string")):
                self._note(message, None)
                full = message.turn.end > self._seat.capacity
                return self._end(End(reward, components, "max_tokens" if full else "max_turn_tokens"))
            result, waited = await self._step(message.text)
            self._note(message, result)
            self._recordings[-1].waited(waited)
            reward += result.reward
            components = result.components
            if result.done:
                return self._end(End(reward, components, "truncated" if result.truncated else "completed"))
            last = num_turns == self._limits.max_turns
            ids, reason = ([], "max_turns") if last else self._go_on(message, result, waited)
            if reason:
                return self._end(End(reward, components, reason))

    def close(self) -> None:
        """Let go of the environment; it is closed in the background."""
        if self._environment is not None:
            self._calls.close(self._environment, self._limits.step_seconds)

    # ---- turns ----------------------------------------------------------------------------------

    async def _open(self) -> list[int]:
        started = time.monotonic()

        async def reset() -> object:
            self._environment = self._make_environment()
            return await self._environment.reset(self.spec.task_seed)

        first = answers.question(await self._call(reset), self._limits.max_observation_bytes)
        try:
            ids = opening_ids(self._tokenizer, self._framing, first)
        except DataError as error:
            raise EpisodeFailed("prompt_refused", str(error), retryable=False) from error
        if len(ids) > self._seat.room:
            raise EpisodeFailed("prompt_too_long", f"{len(ids)} tokens, accepted {self._seat.room}", retryable=False)
        self._recordings.append(Recording(first.text, len(ids), time.monotonic() - started))
        return ids

    async def _speak(self, ids: list[int]) -> _Message:
        started = time.monotonic()
        turn = await self._seat.speak(ids, self._seconds_left())
        if turn.failure:
            raise EpisodeFailed(turn.failure, "the engine gave no message")
        drawn = self._seat.drawn(turn)
        return _Message(turn, drawn, self._tokenizer.decode(drawn), time.monotonic() - started)

    async def _step(self, text: str) -> tuple[StepResult, float]:
        environment, started = self._environment, time.monotonic()
        assert environment is not None, "a step before the environment is open"
        value = await self._call(lambda: environment.step(text))
        result, was_cut = answers.answer(value, self._limits.max_observation_bytes)
        self._counters.num_cut_observations += was_cut
        return result, time.monotonic() - started

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        return await self._calls.run(call, self._limits.step_seconds)

    def _note(self, message: _Message, result: StepResult | None) -> None:
        self._recordings[-1].policy(message.turn.start, message.turn.end, message.text, message.seconds, result)

    def _go_on(self, message: _Message, result: StepResult, waited: float) -> tuple[list[int], str]:
        """The ids of the environment's answer, for this slot or an empty one; with a finish reason it does not go on."""
        if self._seconds_left() <= 0:
            return [], "max_seconds"
        try:
            reply = self._framing.reply(message.ids, result.text, result.role)
        except DataError as error:  # a template may refuse what was said
            raise EpisodeFailed("reply_refused", str(error)) from error
        # A message that a stop rule ended has no mark at its end: it is no token of the policy then.
        mark = [] if reply.forks or message.turn.stopped else [self._tokenizer.end_of_turn]
        ids = [*mark, *reply.ids]
        if len(ids) > (self._seat.capacity if reply.forks else self._seat.room):
            return [], "max_tokens"
        if reply.forks:
            if len(self._recordings) > self._limits.max_forks:
                return [], "max_forks"
            self._fork(ids, result)
        else:
            self._recordings[-1].tool(len(ids), result, waited)
        return ids, ""

    def _fork(self, ids: list[int], result: StepResult) -> None:
        self._recordings[-1].close(self._seat.conversation())
        self._seat.fork()
        self._counters.num_forks += 1
        self._recordings.append(Recording(self._tokenizer.decode(ids), len(ids), 0.0, result.tool_calls))

    def _end(self, end: End) -> Episode:
        self._recordings[-1].close(self._seat.conversation())
        return rows(self._recordings, self.spec, self._identity, end)

    def _seconds_left(self) -> float:
        return self.started + self._limits.episode_seconds - time.monotonic()

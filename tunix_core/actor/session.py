"""One episode: an environment and a policy taking turns over one growing token sequence.

The policy's tokens, its end of turn included, are the ids it sampled; text is decoded from them for
the environment and for people only. What the environment says is framed by the tokenizer's marks and
is no policy token.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from typing import Protocol

from tunix_core.actor.policy_engine import PolicyEngine, TurnEnd
from tunix_core.environments import Environment, split_of
from tunix_core.errors import EnvironmentFailure
from tunix_core.tokenizer import Tokenizer
from tunix_core.types import Trajectory, Turn


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeSpec:
    """One attempt at one member of a group."""

    group_id: str
    group_size: int
    member: int
    task_id: str
    task_seed: int
    attempt: int = 0
    """Counts the failures before it."""

    @property
    def episode_id(self) -> str:
        return f"{self.group_id}-{self.member:03d}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Who writes, and how it samples."""

    actor_id: str
    incarnation: str
    environment: str
    temperature: float
    max_turns: int
    timeout_seconds: float
    """Deadline of one reset or step."""


class EpisodeFailed(Exception):
    """The environment broke; `kind` is what the failure is counted under."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


class Speaker(Protocol):
    """What lets the policy speak: appends `ids` to the slot and returns when its turn is over."""

    async def speak(self, slot: int, ids: list[int]) -> TurnEnd: ...


async def play(
    spec: EpisodeSpec,
    identity: Identity,
    environment: Environment,
    tokenizer: Tokenizer,
    engine: PolicyEngine,
    slot: int,
    speaker: Speaker,
) -> Trajectory:
    """Play one episode in `slot`.

    Raises:
        EpisodeFailed: the environment raised or ran past its deadline.
    """
    turns: list[Turn] = []
    messages: list[dict[str, str]] = []
    environment_seconds = generation_seconds = 0.0
    components: dict[str, float] = {}
    reward, finish_reason = 0.0, "truncated"

    started = time.perf_counter()
    first = await _guarded(environment.reset(spec.task_seed), identity.timeout_seconds)
    ids = tokenizer.opening(first.instructions, first.text)
    seconds = time.perf_counter() - started
    environment_seconds += seconds
    said = Turn(role="prompt", start=0, end=len(ids), seconds=seconds)
    messages.append({"role": "prompt", "content": first.text})
    if len(ids) > engine.room(slot):
        raise EpisodeFailed("prompt_too_long", f"{len(ids)} tokens, accepted {engine.room(slot)}")

    for number in range(identity.max_turns):
        turns.append(said)
        started = time.perf_counter()
        end = await speaker.speak(slot, ids)
        seconds = time.perf_counter() - started
        generation_seconds += seconds
        if end.failure:
            raise EpisodeFailed(end.failure, "the engine gave no message")
        text = tokenizer.decode(engine.transcripts.tokens[slot, end.start : end.end - end.stopped].tolist())
        messages.append({"role": "policy", "content": text})
        if not end.stopped:
            turns.append(Turn(role="policy", start=end.start, end=end.end, seconds=seconds))
            break

        started = time.perf_counter()
        result = await _guarded(environment.step(text), identity.timeout_seconds)
        waited = time.perf_counter() - started
        environment_seconds += waited
        reward += result.reward
        components = dict(result.components)
        turns.append(Turn(role="policy", start=end.start, end=end.end, reward=result.reward, seconds=seconds))
        if result.done:
            finish_reason = "truncated" if result.truncated else "completed"
            break
        ids = tokenizer.reply(result.text)
        if number + 1 == identity.max_turns or len(ids) > engine.room(slot):
            break
        messages.append({"role": "tool", "content": result.text})
        said = Turn(
            role="tool",
            start=end.end,
            end=end.end + len(ids),
            tool_name=",".join(call.name for call in result.tool_calls),
            tool_ok=all(call.ok for call in result.tool_calls),
            seconds=waited,
        )

    conversation = engine.transcripts.conversation(slot)
    return Trajectory(
        trajectory_id=f"{spec.episode_id}-0",
        episode_id=spec.episode_id,
        group_id=spec.group_id,
        group_size=spec.group_size,
        task_id=spec.task_id,
        environment=identity.environment,
        task_seed=spec.task_seed,
        split=split_of(spec.task_seed),
        actor_id=identity.actor_id,
        incarnation=identity.incarnation,
        created_at=time.time(),
        tokens=conversation.tokens,
        loss_mask=conversation.loss_mask,
        behavior_logprobs=conversation.logprobs,
        token_policy_version=conversation.versions,
        temperature=identity.temperature,
        turns=tuple(turns),
        reward=reward,
        reward_components=components,
        finish_reason=finish_reason,
        generation_seconds=generation_seconds,
        environment_seconds=environment_seconds,
        messages=json.dumps(messages, ensure_ascii=False),
    )


async def _guarded(call, timeout_seconds: float):  # type: ignore[no-untyped-def]
    """Await an environment's call under its deadline; whatever breaks in it costs this episode only."""
    try:
        async with asyncio.timeout(timeout_seconds):
            return await call
    except TimeoutError:
        raise EpisodeFailed("environment_timeout", f"over {timeout_seconds} s") from None
    except EnvironmentFailure as error:
        raise EpisodeFailed("environment_failure", str(error)) from error
    except Exception as error:
        # An environment is a plug-in: an error of its own must not end the process, only be counted.
        raise EpisodeFailed(f"environment_{type(error).__name__}", str(error)) from error

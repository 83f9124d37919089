"""What an environment returned, checked and cut to size before anything is made of it.

A text may be of any length: nothing here or later encodes more of one than its limit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from tunix_core.actor.episodes import EpisodeFailed
from tunix_core.environments import Observation, StepResult

CUT = " [cut]"
"""Ends an answer of which more was there."""

MAX_COMPONENTS = 64
MAX_TOOL_NAME_CHARACTERS = 200


def question(value: Any, max_bytes: int) -> Observation:
    """An observation that opens an episode.

    Raises:
        EpisodeFailed: it is none, or longer than allowed: half a task is none.
    """
    if not isinstance(value, Observation) or not _are_texts(value.text, value.instructions, value.without_tools):
        raise _invalid("reset", type(value), "an Observation of texts")
    try:
        length = len(value.text) + len(value.instructions) + len(json.dumps(list(value.tools)))
        length = max(length, len(value.text) + len(value.without_tools))
    except (TypeError, ValueError, RecursionError):
        raise _invalid("reset", "other tools", "tools as JSON objects") from None
    if length > max_bytes:
        raise EpisodeFailed(
            "prompt_too_long",
            f"{length} characters, accepted {max_bytes} (actor.max_observation_bytes)",
            retryable=False,
        )
    return value._replace(
        text=_sound(value.text), instructions=_sound(value.instructions), without_tools=_sound(value.without_tools)
    )


def answer(value: Any, max_bytes: int) -> tuple[StepResult, bool]:
    """The result of a step with its text cut to `max_bytes`, and whether that was needed.

    Raises:
        EpisodeFailed: it is no StepResult, or not of finite numbers.
    """
    if not isinstance(value, StepResult) or not isinstance(value.text, str) or value.role not in ("tool", "user"):
        raise _invalid("step", type(value), "a StepResult with a text of a tool or a user")
    try:
        reward = float(value.reward)
        components = {str(name): float(part) for name, part in value.components.items()}
        calls = tuple(call._replace(name=str(call.name)[:MAX_TOOL_NAME_CHARACTERS]) for call in value.tool_calls)
    except Exception:  # whatever else it is made of
        raise _invalid("step", "something else", "numbers and ToolCalls") from None
    if not math.isfinite(reward) or not _finite(components):
        raise _invalid(
            "step", f"reward {reward}, {len(components)} components", "finite numbers, at most 64 components"
        )
    text, was_cut = cut(value.text, max_bytes)
    return value._replace(text=text, reward=reward, components=components, tool_calls=calls), was_cut


def cut(text: str, max_bytes: int) -> tuple[str, bool]:
    """At most `max_bytes` of UTF-8, ending in `CUT` where something is missing; and whether it does."""
    # A character is at least one byte, so what is encoded is never more than four times the limit.
    data = text[: max_bytes + 1].encode("utf-8", errors="replace")
    if len(data) <= max_bytes:
        return data.decode(), False
    return data[: max_bytes - len(CUT)].decode("utf-8", errors="ignore") + CUT, True


def _are_texts(*values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _sound(text: str) -> str:
    """Without lone surrogates, which no tokenizer takes."""
    return text.encode("utf-8", errors="replace").decode()


def _finite(components: Mapping[str, float]) -> bool:
    return len(components) <= MAX_COMPONENTS and all(math.isfinite(part) for part in components.values())


def _invalid(call: str, received: object, accepted: str) -> EpisodeFailed:
    return EpisodeFailed("environment_invalid", f"{call} returned {received}, accepted {accepted}")

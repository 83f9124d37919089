"""What an environment returned, checked and cut to size before anything is made of it.

A text may be of any length: nothing here or later encodes more of one than its limit.
"""

from __future__ import annotations

import json
import math
from typing import Any

from tunix_core.actor.episodes import EpisodeFailed
from tunix_core.environments import Observation, StepResult
from tunix_core.tools.text import cut

MAX_COMPONENTS = 64
MAX_TOOL_CALLS = 256
MAX_NAME_CHARACTERS = 200
"""Of a tool or a component."""
MAX_REWARD = 1e30
"""Above it float32, in which advantages are computed, overflows: one episode would cost the learner a step."""


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
        num_components, num_calls = len(value.components), len(value.tool_calls)
        if num_components > MAX_COMPONENTS or num_calls > MAX_TOOL_CALLS:
            raise ValueError("too many")
        components = {_name(name): float(part) for name, part in value.components.items()}
        calls = tuple(call._replace(name=_name(call.name), ok=bool(call.ok)) for call in value.tool_calls)
    except Exception:  # whatever else it is made of
        accepted = f"numbers by name and ToolCalls, at most {MAX_COMPONENTS} and {MAX_TOOL_CALLS}"
        raise _invalid("step", "something else", accepted) from None
    if not abs(reward) <= MAX_REWARD or not all(map(math.isfinite, components.values())):
        accepted = f"a reward of at most {MAX_REWARD:g} either way, finite components"
        raise _invalid("step", f"reward {reward} and {len(components)} components", accepted)
    text, was_cut = cut(value.text, max_bytes)
    return value._replace(text=text, reward=reward, components=components, tool_calls=calls), was_cut


def _are_texts(*values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _sound(text: str) -> str:
    """Without lone surrogates, which no tokenizer takes."""
    return text.encode("utf-8", errors="replace").decode()


def _name(value: Any) -> str:
    return _sound(str(value)[:MAX_NAME_CHARACTERS])


def _invalid(call: str, received: object, accepted: str) -> EpisodeFailed:
    return EpisodeFailed("environment_invalid", f"{call} returned {received}, accepted {accepted}")

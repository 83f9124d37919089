"""Scripted perfect episodes as token sequences, framed exactly as sessions frame theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tunix_core.environments.base import Demonstrated, opening_ids
from tunix_core.errors import DataError
from tunix_core.tokenizer import Framing, Tokenizer


class Demonstration(NamedTuple):
    """T tokens."""

    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T], true on the policy's tokens, its end of turn included


def encode_messages(
    tokenizer: Tokenizer, instructions: str | None, messages: Sequence[tuple[str, str]]
) -> Demonstration:
    """`(role, text)` messages, the prompt first, then policy and tool or user in turn, to ids with the policy's marked.

    Raises:
        DataError: roles in another order, or a conversation that would fork.
    """
    framing = tokenizer.framing()
    _check_roles(messages)
    return _encode(tokenizer, framing, framing.opening(instructions, messages[0][1]), messages[1:])


def demonstrations(tokenizer: Tokenizer, environment: Demonstrated, task_seeds: Sequence[int]) -> list[Demonstration]:
    """One per task seed.

    Raises:
        DataError: the chat template does not take one.
    """
    found = []
    for seed in task_seeds:
        framing, messages = tokenizer.framing(), environment.demonstration(seed)
        _check_roles(messages)
        tokens = opening_ids(tokenizer, framing, environment.opening(seed))
        found.append(_encode(tokenizer, framing, tokens, messages[1:]))
    return found


def _check_roles(messages: Sequence[tuple[str, str]]) -> None:
    roles = [role for role, _ in messages]
    if roles[:1] != ["prompt"] or any(
        role not in (("policy",) if place % 2 else ("tool", "user")) for place, role in enumerate(roles) if place
    ):
        raise DataError(f"messages: received the roles {roles}, accepted prompt, then policy and tool or user in turn")


def _encode(
    tokenizer: Tokenizer, framing: Framing, tokens: list[int], messages: Sequence[tuple[str, str]]
) -> Demonstration:
    """What follows the opening."""
    mask = [False] * len(tokens)
    said: list[int] = []
    for role, text in messages:
        if role == "policy":
            said = tokenizer.encode(text)
            ids = [*said, tokenizer.end_of_turn]
        else:
            ids, forks = framing.reply(said, text, role)
            if forks:
                raise DataError("messages: the chat template rewrites an earlier answer, accepted ones that it keeps")
        tokens += ids
        mask += [role == "policy"] * len(ids)
    return Demonstration(np.array(tokens, np.int32), np.array(mask, bool))

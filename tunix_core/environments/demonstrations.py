"""Scripted perfect episodes as token sequences, framed exactly as sessions frame theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tunix_core.environments.base import Demonstrated
from tunix_core.errors import DataError
from tunix_core.tokenizer import Tokenizer


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
    roles = [role for role, _ in messages]
    if roles[:1] != ["prompt"] or any(
        role not in (("policy",) if place % 2 else ("tool", "user")) for place, role in enumerate(roles) if place
    ):
        raise DataError(f"messages: received the roles {roles}, accepted prompt, then policy and tool or user in turn")
    framing = tokenizer.framing()
    tokens = framing.opening(instructions, messages[0][1])
    mask = [False] * len(tokens)
    said: list[int] = []
    for role, text in messages[1:]:
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


def demonstrations(tokenizer: Tokenizer, environment: Demonstrated, task_seeds: Sequence[int]) -> list[Demonstration]:
    """One per task seed."""
    return [
        encode_messages(tokenizer, environment.instructions, environment.demonstration(seed)) for seed in task_seeds
    ]

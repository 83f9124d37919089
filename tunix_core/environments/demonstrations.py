"""Scripted perfect episodes as token sequences, framed exactly as sessions frame theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tunix_core.environments.base import Environment
from tunix_core.tokenizer import ByteTokenizer


class Demonstration(NamedTuple):
    """T tokens."""

    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T], true on the policy's tokens, its END_OF_TURN included


def encode_messages(messages: Sequence[tuple[str, str]]) -> Demonstration:
    """`(role, text)` messages, roles prompt, policy and tool, to ids with the policy's marked."""
    tokenizer = ByteTokenizer()
    tokens: list[int] = [ByteTokenizer.BOS]
    mask = [False]
    for role, text in messages:
        ids = [*tokenizer.encode(text), ByteTokenizer.END_OF_TURN]
        tokens += ids
        mask += [role == "policy"] * len(ids)
    return Demonstration(np.array(tokens, np.int32), np.array(mask, bool))


def demonstrations(environment: Environment, task_seeds: Sequence[int]) -> list[Demonstration]:
    """One per task seed."""
    return [encode_messages(environment.demonstration(seed)) for seed in task_seeds]

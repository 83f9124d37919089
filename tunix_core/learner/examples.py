"""Examples as tokens, and batches of them: a conversation is one segment, a pair of answers two adjacent ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tunix_core.data.conversations import Conversation, Message, Preference
from tunix_core.data.packing import Layout, PackedArrays, best_fit, pack
from tunix_core.environments.demonstrations import Demonstration, encode_messages
from tunix_core.errors import DataError
from tunix_core.tokenizer import Tokenizer

Example = tuple[Demonstration, ...]
"""Segments that lie next to each other in one window."""


def conversation_example(tokenizer: Tokenizer, conversation: Conversation) -> Example:
    """One segment; what the assistant says is what the policy is to learn, its ends of turn included.

    A tool's message is framed as rollouts frame it.

    Raises:
        DataError: the tokenizer has no place for a system message, or needs one.
    """
    return (_encode(tokenizer, conversation),)


def preference_example(tokenizer: Tokenizer, preference: Preference) -> Example:
    """The chosen answer and the rejected one, each after the prompt; only the answers are the policy's.

    Raises as `conversation_example` does.
    """
    pair = []
    for answer in (preference.chosen, preference.rejected):
        messages = (*preference.prompt.messages, Message("assistant", answer))
        segment = _encode(tokenizer, preference.prompt._replace(messages=messages))
        mask = np.zeros_like(segment.loss_mask)
        mask[-len(tokenizer.encode(answer)) - 1 :] = True
        pair.append(segment._replace(loss_mask=mask))
    return tuple(pair)


def _encode(tokenizer: Tokenizer, conversation: Conversation) -> Demonstration:
    system = conversation.system
    if system and tokenizer.opening(system, "") == tokenizer.opening("", ""):
        raise DataError(
            f"{conversation.place}: received a system message, accepted none: the tokenizer leaves it out. "
            "Say it in the user's message, or start from a pretrained model."
        )
    first, *rest = conversation.messages
    messages = [("prompt", first.text)]
    messages += [("policy" if message.role == "assistant" else message.role, message.text) for message in rest]
    try:
        return encode_messages(tokenizer, system, messages)
    except DataError as error:
        raise DataError(f"{conversation.place}: {error}") from error


def num_tokens(example: Example) -> int:
    """Of all its segments."""
    return sum(len(segment.tokens) for segment in example)


def lengths_of(examples: Sequence[Example]) -> np.ndarray:
    """int64 [N]"""
    return np.array([num_tokens(example) for example in examples], np.int64)


def pack_examples(examples: Sequence[Example], num_windows: int, window_tokens: int) -> PackedArrays:
    """A batch, advantages zero; the examples must fit (`best_fit` of `lengths_of` tells)."""
    layout = best_fit(lengths_of(examples), window_tokens)
    segments = [segment for example in examples for segment in example]
    lengths = np.array([len(segment.tokens) for segment in segments], np.int64)
    window = np.repeat(layout.window, [len(example) for example in examples])
    start = [
        first + before
        for first, example in zip(layout.start.tolist(), examples, strict=True)
        for before in np.cumsum([0, *(len(segment.tokens) for segment in example[:-1])]).tolist()
    ]
    tokens = np.concatenate([segment.tokens for segment in segments])
    return pack(
        Layout(window, np.array(start, np.int32), layout.num_windows),
        lengths,
        tokens=tokens,
        loss_mask=np.concatenate([segment.loss_mask for segment in segments]),
        behavior_logprobs=np.zeros(len(tokens), np.float32),
        advantages=np.zeros(len(segments), np.float32),
        temperature=np.ones(len(segments), np.float32),
        num_windows=num_windows,
        window_tokens=window_tokens,
    )

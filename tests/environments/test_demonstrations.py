"""Demonstrations as tokens: framed as sessions frame their episodes, tools and results in the model's own form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import numpy as np
import pytest

from tests.environments.support import made
from tests.pretrained.bpe import QWEN3, bpe
from tunix_core.environments.base import Observation, opening_ids
from tunix_core.environments.demonstrations import demonstrations
from tunix_core.tokenizer import ByteTokenizer, Tokenizer

SEED = 4


def rolled_out(tokenizer: Tokenizer, name: str, form: str) -> list[int]:
    """The ids of the demonstration's episode as a session grows them."""
    environment = made(name, tool_format=form)

    async def go() -> list[int]:
        framing = tokenizer.framing()
        ids = opening_ids(tokenizer, framing, await environment.reset(SEED))
        for role, text in environment.demonstration(SEED):
            if role == "policy":
                said = tokenizer.encode(text)
                ids += [*said, tokenizer.end_of_turn]
                result = await environment.step(text)
                if not result.done:
                    ids += framing.reply(said, result.text, result.role).ids
        return ids

    return asyncio.run(go())


@pytest.mark.parametrize("form", ["plain", "hermes", "llama3"])
@pytest.mark.parametrize("name", ["lookup", "sql", "files", "python"])
@pytest.mark.parametrize("made_by", [ByteTokenizer, bpe, lambda: bpe(QWEN3)], ids=["bytes", "bpe", "qwen3"])
def test_a_demonstration_is_what_a_session_would_have_made(
    made_by: Callable[[], Tokenizer], name: str, form: str
) -> None:
    tokenizer = made_by()
    (found,) = demonstrations(tokenizer, made(name, tool_format=form), [SEED])
    assert found.tokens.tolist() == rolled_out(tokenizer, name, form)
    spoken = tokenizer.decode(found.tokens[found.loss_mask])
    said = [text for role, text in made(name, tool_format=form).demonstration(SEED) if role == "policy"]
    assert spoken == "".join(text + tokenizer.decode([tokenizer.end_of_turn]) for text in said)
    assert found.tokens.dtype == np.int32


def test_tools_and_results_read_as_qwen_writes_them() -> None:
    """Once each: neither the template nor the environment adds to what the other has said."""
    (found,) = demonstrations(bpe(QWEN3), made("lookup", tool_format="hermes"), [SEED])
    text = bpe(QWEN3).decode(found.tokens)
    environment = made("lookup")
    first, second, value = environment.task(SEED)
    assert text.count('{"type": "function", "function": {"name": "get"') == 1
    assert text.count("<tools>\n") == 1
    call = '<|im_start|>assistant\n<tool_call>\n{"name": "get", "arguments": {"key": "%s"}}\n</tool_call><|im_end|>\n'
    reply = "<|im_start|>user\n<tool_response>\n%s\n</tool_response><|im_end|>\n"
    dialogue = (
        call % first + reply % second + call % second + reply % value + f"<|im_start|>assistant\n{value}<|im_end|>"
    )
    assert text.endswith(dialogue)


def test_a_template_without_tools_gets_them_in_words() -> None:
    assert (bpe().takes_tools, bpe(QWEN3).takes_tools) == (False, True)
    environment = made("lookup", tool_format="hermes")
    text = bpe().decode(demonstrations(bpe(), environment, [SEED])[0].tokens)
    schema = json.dumps(environment.opening(SEED).tools[0])
    assert text.count(schema) == 1
    assert text.index("You may call functions") < text.index(schema)


def test_an_environment_without_tools_is_opened_as_it_is() -> None:
    tokenizer = bpe()
    first = Observation("question", "instructions")
    assert opening_ids(tokenizer, tokenizer.framing(), first) == tokenizer.opening("instructions", "question")

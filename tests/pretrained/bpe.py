"""A byte-level BPE with merges, trained on a few words, so that many strings have several spellings in ids."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

from tests.pretrained.support import TEMPLATE
from tunix_core.pretrained.chat import ChatTokenizer

QWEN3 = (Path(__file__).parent / "qwen3_chat_template.jinja").read_text()
"""The chat template of Qwen3 (Apache 2.0): it drops the thinking of turns before a user's last question."""

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Single ids that are no marks, as Qwen3's tokenizer has them."""

_CORPUS = (
    "the cat sat on the mat and then the other cats sat there  under   the hat\n\n" * 3,
    "system user assistant tool answer answers answered 1234 12345 123456 llama llamallama\n" * 3,
    'get {"key": "value", "keys": ["a", "b"]} éèê 日本語 日本 本語 🙂🙂 ---- ==== \t\t\n \n' * 3,
)


@functools.lru_cache
def _tokenizer_json() -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return str(tokenizer.to_str())


def bpe(template: str = TEMPLATE) -> ChatTokenizer:
    files = {"tokenizer.json": _tokenizer_json(), "tokenizer_config.json": json.dumps({"chat_template": template})}
    return ChatTokenizer(files, 520)


def spelled(tokenizer: ChatTokenizer, text: str, rng: random.Random) -> list[int]:
    """Ids that decode to `text`, cut at random places: seldom those that encoding it gives."""
    data, ids = text.encode(), []
    while data:
        length = rng.randint(1, 6)
        piece = data[:length].decode("utf-8", errors="ignore")
        piece = piece or data.decode("utf-8", errors="ignore")[0]
        ids += tokenizer.encode(piece)
        data = data[len(piece.encode()) :]
    return ids

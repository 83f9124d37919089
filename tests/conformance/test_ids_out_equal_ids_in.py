"""Decode then re-encode drifted, streamed ids wrong (TRL #5224, agent-lightning #326)."""

from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import pytest

from tests.actor.scripted_engine import ScriptedEngine
from tests.actor.sessions import LIMITS, play
from tests.pretrained.bpe import QWEN3, bpe, spelled
from tunix_core.environments import Observation, StepResult
from tunix_core.pretrained.chat import ChatTokenizer
from tunix_core.tokenizer import ByteTokenizer, Tokenizer

PIECES = (
    *(
        "the",
        "cat",
        "cats",
        " the",
        "  ",
        "\n",
        "\n\n",
        " \n",
        "llama",
        "lla",
        "ma",
        "123",
        "4",
        "日本",
        "語",
        "🙂",
        "é",
    ),
    *(
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "<|",
        "im_end|>",
        "<tool_call>",
        '{"key": "a"}',
        "\ue000",
        "</",
        "think>",
    ),
)
NUM_EPISODES = 40


def text(rng: random.Random, at_least: int = 0) -> str:
    return "".join(rng.choices(PIECES, k=rng.randint(at_least, 9)))


class Talks:
    """Answers with merge-ambiguous text, marks spelled out among it; notes which messages it was told."""

    name = "talks"

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._left = self._rng.randint(1, 3)

    async def reset(self, _seed: int) -> Observation:
        return Observation(text(self._rng), text(self._rng))

    async def step(self, _message: str) -> StepResult:
        self._left -= 1
        return StepResult(text(self._rng), 0.0, self._left == 0)

    async def close(self) -> None:
        pass


class Noting(ScriptedEngine):
    """Keeps apart what it drew, message by message."""

    drawn: list[list[int]]

    def begin_turn(self, slot: int, ids: list[int]) -> None:
        super().begin_turn(slot, ids)
        self.drawn.append(list(self._left[slot]))


TOKENIZERS: dict[str, Tokenizer] = {"bpe": bpe(), "bpe, rendered": bpe(QWEN3), "bytes": ByteTokenizer()}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_out_equal_ids_in(name: str) -> None:
    """Every token that was drawn is stored as it was drawn, in its turn, and nothing else is the policy's."""
    tokenizer = TOKENIZERS[name]

    def script(rng: random.Random) -> list[int]:
        said = text(rng, at_least=1)
        ids = spelled(tokenizer, said, rng) if isinstance(tokenizer, ChatTokenizer) else tokenizer.encode(said)
        # Now and then ids that are no text, and a mark in the middle of a message.
        ids += [rng.randrange(tokenizer.end_of_turn) for _ in range(rng.randint(0, 2))]
        return [token for token in ids if token != tokenizer.end_of_turn] + [tokenizer.end_of_turn]

    engine = Noting(script, num_slots=8, end_of_turn=tokenizer.end_of_turn)
    engine.drawn = []
    limits = dataclasses.replace(LIMITS, max_observation_bytes=4096)
    outcomes, _ = play(
        Talks, script=script, engine=engine, num_episodes=NUM_EPISODES, tokenizer=tokenizer, limits=limits
    )

    stored, respelled = [], 0
    for episode in outcomes:
        for row in episode:
            assert [turn.start for turn in row.turns] == [0, *(turn.end for turn in row.turns[:-1])]
            assert row.turns[-1].end == row.num_tokens
            mask = np.zeros(row.num_tokens, bool)
            for turn, message in zip(row.turns, json.loads(row.messages), strict=True):
                assert turn.role == message["role"]
                if turn.role == "policy":
                    ids = row.tokens[turn.start : turn.end].tolist()
                    mask[turn.start : turn.end] = True
                    stored.append(ids)
                    assert message["content"] == tokenizer.decode(ids[:-1])
                    respelled += tokenizer.encode(message["content"]) != ids[:-1]
            np.testing.assert_array_equal(row.loss_mask, mask)
            np.testing.assert_array_equal(row.token_policy_version, np.where(mask, 0, -1))
    assert sorted(stored) == sorted(engine.drawn)
    if name != "bytes":
        assert respelled > len(stored) / 2, "most messages must be such that decoding and encoding changes them"

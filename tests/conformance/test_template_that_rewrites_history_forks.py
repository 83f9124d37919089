"""A chat template dropped earlier thinking, and the prefix broke (prime-rl #1334)."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import jinja2
import numpy as np
import pytest

from tests.actor.scripted_engine import ScriptedEngine
from tests.actor.sessions import LIMITS, play
from tests.pretrained.bpe import QWEN3, bpe
from tunix_core.actor.episodes import limits_of
from tunix_core.config_loading import load_recipe
from tunix_core.environments import Observation, StepResult
from tunix_core.environments.demonstrations import encode_messages
from tunix_core.errors import ConfigError, DataError
from tunix_core.pretrained.chat import ChatTokenizer

FORGETS = QWEN3.replace('message.role == "tool"', 'message.role == "none"')
"""Qwen3's template as it is without tools: each answer of the environment is a user's, and drops the thinking before it."""

THOUGHTFUL = "<think>\nlet me see\n</think>\n\nget a"
SLOPPY = "<think>let me see</think>get a"
PLAIN = "get a"
TURNS = 3


class Asks:
    name = "asks"

    def __init__(self, _seed: int) -> None:
        self._steps = 0

    async def reset(self, _seed: int) -> Observation:
        return Observation("the question", "the rules", ({"type": "function", "function": {"name": "get"}},))

    async def step(self, _message: str) -> StepResult:
        self._steps += 1
        return StepResult(f"answer <|im_end|> {self._steps}", float(self._steps), self._steps == TURNS)

    async def close(self) -> None:
        pass


def played(tokenizer: ChatTokenizer, said: str, **limits: Any) -> tuple[Any, ScriptedEngine]:
    def script(_random: random.Random) -> list[int]:
        return [*tokenizer.encode(said), tokenizer.end_of_turn]

    engine = ScriptedEngine(script, num_slots=1, end_of_turn=tokenizer.end_of_turn)
    settings = dataclasses.replace(LIMITS, max_observation_bytes=4096, **limits)
    (episode,), _ = play(Asks, script=script, engine=engine, tokenizer=tokenizer, limits=settings)
    return episode, engine


def rendered(template: str, said: str, num_turns: int) -> str:
    """The history before message `num_turns`, by plain Jinja; what the environment says has no mark in its text."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    messages = [{"role": "system", "content": "the rules"}, {"role": "user", "content": "the question"}]
    role = "user" if template is FORGETS else "tool"
    for turn in range(num_turns):
        messages += [
            {"role": "assistant", "content": said},
            {"role": role, "content": f"answer <|im_end|> {turn + 1}"},
        ]
    tools = [{"type": "function", "function": {"name": "get"}}]
    return environment.from_string(template).render(messages=messages, tools=tools, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("template", "said", "forks"),
    [(FORGETS, THOUGHTFUL, True), (FORGETS, PLAIN, False), (QWEN3, THOUGHTFUL, False), (QWEN3, SLOPPY, True)],
)
def test_template_that_rewrites_history_forks(template: str, said: str, forks: bool) -> None:
    """Turn k+1 extends turn k's ids, or it is in another trajectory that begins as the template says."""
    tokenizer = bpe(template)
    assert tokenizer.may_fork
    episode, engine = played(tokenizer, said)
    assert len(episode) == (TURNS if forks else 1)
    assert [row.fork_index for row in episode] == list(range(len(episode)))
    assert len({row.trajectory_id for row in episode}) == len(episode)
    assert {(row.episode_id, row.reward, row.finish_reason) for row in episode} == {("g-000", 6.0, "completed")}
    assert len(set(engine.keys)) == len(engine.keys) == len(episode), "each trajectory draws by a key of its own"

    message = [*tokenizer.encode(said), tokenizer.end_of_turn]
    spoken = [
        row.tokens[turn.start : turn.end].tolist() for row in episode for turn in row.turns if turn.role == "policy"
    ]
    assert spoken == [message] * TURNS, "each message is in one trajectory, as it was drawn"
    assert [turn.reward for row in episode for turn in row.turns if turn.role == "policy"] == [1.0, 2.0, 3.0]
    for fork, row in enumerate(episode):
        assert [turn.start for turn in row.turns] == [0, *(turn.end for turn in row.turns[:-1])]
        assert row.turns[-1].end == row.num_tokens
        mine = np.zeros(row.num_tokens, bool)
        for turn in row.turns:
            mine[turn.start : turn.end] = turn.role == "policy"
        np.testing.assert_array_equal(row.loss_mask, mine)
        before = row.tokens[: row.turns[-1].start]
        assert tokenizer.decode(before) == rendered(template, said, fork if forks else TURNS - 1)
        # What the environment said with a mark in it is no mark.
        assert "answer <|im_end|> 1" not in tokenizer.decode(before) or _marks(tokenizer, before) < _spelled(
            tokenizer, before
        )


def _marks(tokenizer: ChatTokenizer, ids: Any) -> int:
    return list(ids).count(tokenizer.end_of_turn)


def _spelled(tokenizer: ChatTokenizer, ids: Any) -> int:
    return tokenizer.decode(ids).count("<|im_end|>")


def test_the_number_of_forks_is_bounded() -> None:
    episode, _ = played(bpe(FORGETS), THOUGHTFUL, max_forks=1)
    assert [row.finish_reason for row in episode] == ["max_forks", "max_forks"]
    assert {row.reward for row in episode} == {3.0}, "of the two messages that were said"


def test_a_fork_that_does_not_fit_ends_the_episode() -> None:
    tokenizer = bpe(FORGETS)
    message = [*tokenizer.encode(THOUGHTFUL), tokenizer.end_of_turn]
    opening = tokenizer.framing().opening(
        "the rules", "the question", ({"type": "function", "function": {"name": "get"}},)
    )
    engine = ScriptedEngine(
        lambda _: list(message), num_slots=1, end_of_turn=message[-1], context_tokens=len(opening) + len(message) + 2
    )
    limits = dataclasses.replace(LIMITS, max_observation_bytes=4096)
    (episode,), _ = play(Asks, script=lambda _: message, engine=engine, tokenizer=tokenizer, limits=limits)
    assert [row.finish_reason for row in episode] == ["max_tokens"]


def test_templates_that_may_fork_want_it_said() -> None:
    """The learner reckons with as many trajectories as an episode may have, so none come unannounced."""
    with pytest.raises(ConfigError, match=r"actor.max_forks: received 0"):
        limits_of(load_recipe("lookup"), bpe(FORGETS))
    one, more = (load_recipe("lookup", {"actor.max_forks": forks}) for forks in (0, 3))
    assert limits_of(more, bpe(FORGETS)).max_forks == 3
    assert more.max_microbatches(256) > one.max_microbatches(256)


def test_supervised_examples_do_not_fork() -> None:
    talk = [("prompt", "q"), ("policy", THOUGHTFUL), ("user", "more"), ("policy", "b")]
    with pytest.raises(DataError, match="rewrites an earlier answer"):
        encode_messages(bpe(FORGETS), None, talk)
    kept = encode_messages(bpe(QWEN3), None, [(role.replace("user", "tool"), text) for role, text in talk])
    assert "let me see" in bpe(QWEN3).decode(kept.tokens)

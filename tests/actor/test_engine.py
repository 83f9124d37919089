from typing import Any

import numpy as np
import pytest

from tests.actor.support import ACTOR, engine, expected_logprobs, run_until_parked, weights
from tunix_core.actor.engine import Engine
from tunix_core.actor.policy_engine import Request
from tunix_core.actor.sampling import request_key
from tunix_core.distributed.compilation import CompilationCounter
from tunix_core.tokenizer import ByteTokenizer

PROMPTS = [[256, 65, 66, 257], [256, 67, 257], [256, *range(70, 82), 257], [256, 90, 91, 92, 93, 94, 257]]
ANSWERS = [[257, 48, 257], [49, 50, 51, 52, 53, 54, 257], [55], [56, 57, 257]]


def converse(subject: Engine, num_turns: int, temperature: float = 0.7, **sampling: Any) -> list[int]:
    """Conversations that start at different times, so that slots are in different states."""
    slots = []
    for i, prompt in enumerate(PROMPTS):
        slot = subject.acquire(Request(key=request_key("engine", i), temperature=temperature, **sampling))
        subject.begin_turn(slot, prompt)
        slots.append(slot)
        subject.run_once()
    run_until_parked(subject)
    for _ in range(num_turns - 1):
        for slot, answer in zip(slots, ANSWERS, strict=True):
            subject.begin_turn(slot, answer)
            subject.run_once()
        run_until_parked(subject)
    return slots


@pytest.fixture(scope="module")
def params():
    return weights(0)


@pytest.fixture(scope="module")
def sampler(params) -> Engine:
    return engine(params)


def check(subject: Engine, slot: int, params, temperature: float) -> None:
    length = subject.transcripts.lengths[slot]
    mask = subject.transcripts.loss_mask[slot, :length]
    expected = expected_logprobs(params, subject.transcripts.tokens[slot, :length], temperature)
    np.testing.assert_allclose(subject.transcripts.logprobs[slot, :length][mask], expected[mask], atol=2e-5)
    assert (subject.transcripts.logprobs[slot, :length][~mask] == 0).all()
    assert (subject.transcripts.versions[slot, :length][~mask] == -1).all()


def test_logprobs_are_those_of_the_sampling_temperature(sampler: Engine, params) -> None:
    for temperature in (0.7, 1.0):
        slots = converse(sampler, 3, temperature)
        for slot in slots:
            check(sampler, slot, params, temperature)
            assert sampler.transcripts.loss_mask[slot].sum() >= 3
            sampler.release(slot)


def test_policy_and_environment_tokens_alternate(sampler: Engine) -> None:
    slots = converse(sampler, 2)
    for slot, prompt, answer in zip(slots, PROMPTS, ANSWERS, strict=True):
        length = int(sampler.transcripts.lengths[slot])
        mask = sampler.transcripts.loss_mask[slot, :length]
        first = int(np.argmax(mask))
        assert sampler.transcripts.tokens[slot, :first].tolist() == prompt
        gap = np.flatnonzero(~mask[first:]) + first
        assert sampler.transcripts.tokens[slot, gap].tolist() == answer
        assert gap.tolist() == list(range(gap[0], gap[-1] + 1))
        sampler.release(slot)


def test_the_cache_is_kept_over_a_tool_call(sampler: Engine) -> None:
    counters = sampler.counters
    before = counters.prefill_tokens + counters.shared_tokens
    slots = converse(sampler, 3)
    read = counters.prefill_tokens + counters.shared_tokens - before  # an earlier test's slot may hold the same opening
    # Everything the environment said once, and the last token of each ended turn, which was drawn but not read.
    said = sum(map(len, PROMPTS)) + 2 * sum(map(len, ANSWERS))
    assert read == said + 2 * len(slots)
    assert sampler.counters.recomputed_tokens == 0
    for slot in slots:
        sampler.release(slot)


def test_turns_end_at_end_of_turn_or_at_their_limit(params) -> None:
    subject = engine(params, num_slots=32, prefill_rows=16, decode_rows=12)
    slots = [subject.acquire(Request(key=request_key("ends", i), temperature=1.5)) for i in range(32)]
    for slot in slots:
        subject.begin_turn(slot, PROMPTS[0])
    ended = run_until_parked(subject)
    assert sorted(turn.slot for turn in ended) == slots
    assert any(turn.stopped for turn in ended)
    for turn in ended:
        drawn = subject.transcripts.tokens[turn.slot, turn.start : turn.end]
        assert turn.start == len(PROMPTS[0])
        assert (drawn[:-1] != ByteTokenizer.END_OF_TURN).all()
        assert turn.stopped == (drawn[-1] == ByteTokenizer.END_OF_TURN)
        assert turn.stopped or len(drawn) == ACTOR.max_turn_tokens
        check(subject, turn.slot, params, 1.5)


def test_the_context_is_never_overrun(sampler: Engine, params) -> None:
    context = ACTOR.context_tokens
    slot = sampler.acquire(Request(key=request_key("full"), temperature=1.0))
    prompt = [256] + [65] * (context - 4)
    assert len(prompt) <= sampler.room(slot)
    sampler.begin_turn(slot, prompt)
    (turn,) = run_until_parked(sampler)
    assert len(prompt) < turn.end <= context
    check(sampler, slot, params, 1.0)
    sampler.release(slot)


def test_a_released_slot_leaves_nothing_behind(sampler: Engine, params) -> None:
    for slot in converse(sampler, 3):
        sampler.release(slot)
    for slot in converse(sampler, 1):
        check(sampler, slot, params, 0.7)
        sampler.release(slot)
    assert sampler.num_free == ACTOR.num_slots


def test_greedy_takes_the_likeliest_at_temperature_one(params) -> None:
    subject = engine(params, sampling="greedy")
    (slot, *_) = converse(subject, 1, temperature=0.3, greedy=True)
    check(subject, slot, params, 1.0)


@pytest.mark.parametrize("size", [3, 9, 30])
def test_a_partly_filled_batch_disturbs_no_parked_slot(params, size: int) -> None:
    subject = engine(params, num_slots=32, prefill_rows=16, decode_rows=12)
    slots = [subject.acquire(Request(key=request_key("parked", i), temperature=0.8)) for i in range(32)]
    for slot in slots:
        subject.begin_turn(slot, PROMPTS[slot % 4])
    run_until_parked(subject)
    for group in (slots[:size], slots[size:], slots):
        for slot in group:
            subject.begin_turn(slot, [48 + slot, 257])
        run_until_parked(subject)
    for slot in slots:
        check(subject, slot, params, 0.8)


def test_nothing_compiles_after_warm_up(params) -> None:
    subject = engine(params)
    counter = CompilationCounter()
    counter.warmed_up()
    other = weights(1)
    for version in range(1, 4):
        subject.swap(other, version)
        for slot in converse(subject, version):
            subject.release(slot)
    assert counter.after_warmup == 0

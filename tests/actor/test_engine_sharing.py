"""A prompt that several conversations begin with is read once, by any of them, under one version."""

import numpy as np

from tests.actor.dialogues import Played, check_logprobs
from tests.actor.support import engine, run_until_parked, weights
from tunix_core.actor.engine import Engine
from tunix_core.actor.policy_engine import Request
from tunix_core.actor.sampling import request_key

PROMPT = [256, *range(60, 75), 257]
FIELDS = {"shared_prefix_tokens": 6}


def start(subject: Engine, name: object, prompt: list[int]) -> tuple[int, Request]:
    request = Request(key=request_key("sharing", name))
    slot = subject.acquire(request)
    subject.begin_turn(slot, prompt)
    return slot, request


def check(subject: Engine, started: list[tuple[int, Request]], params) -> None:
    for slot, request in started:
        check_logprobs(Played(request, subject.transcripts.conversation(slot), []), {subject.version: params})


def test_a_group_reads_its_prompt_once_and_samples_as_if_it_had_not() -> None:
    params = weights(0)
    texts = []
    for shared in (6, 0):
        subject = engine(params, shared_prefix_tokens=shared)
        started = [start(subject, member, PROMPT) for member in range(8)]
        run_until_parked(subject)
        check(subject, started, params)
        texts.append([subject.transcripts.conversation(slot).tokens.tolist() for slot, _ in started])
        copied = 7 * (len(PROMPT) - 1) if shared else 0
        assert subject.counters.shared_tokens == copied
        assert subject.counters.prefill_tokens == (len(PROMPT) + 7 if shared else 8 * len(PROMPT))
    assert texts[0] == texts[1]


def test_members_that_come_later_find_it_in_a_parked_or_given_back_slot() -> None:
    params = weights(0)
    subject = engine(params, **FIELDS)
    first = start(subject, "first", PROMPT)
    run_until_parked(subject)
    second = start(subject, "second", PROMPT)
    run_until_parked(subject)
    assert subject.counters.shared_tokens == len(PROMPT) - 1
    for slot, _ in (first, second):
        subject.release(slot)
    third = start(subject, "third", PROMPT)
    run_until_parked(subject)
    assert subject.counters.shared_tokens == 2 * (len(PROMPT) - 1)
    check(subject, [third], params)


def test_what_differs_is_read() -> None:
    params = weights(0)
    subject = engine(params, **FIELDS)
    other = [*PROMPT[:10], 48, 49, 50, 257]
    short = [*PROMPT[:4], 48, 257]
    started = [start(subject, i, prompt) for i, prompt in enumerate([PROMPT, other, short])]
    run_until_parked(subject)
    assert subject.counters.shared_tokens == 10
    check(subject, started, params)


def test_no_slot_shares_with_what_was_there_before() -> None:
    """Slots taken again and again: nothing of an earlier conversation is taken for the present one's."""
    params = weights(0)
    subject = engine(params, **FIELDS)
    rng = np.random.default_rng(3)
    for round_ in range(4):
        started = []
        for i in range(8):
            length = int(rng.integers(7, 20))
            started.append(start(subject, (round_, i), [*PROMPT[:length], int(rng.integers(48, 51)), 257]))
            subject.run_once()
        run_until_parked(subject)
        check(subject, started, params)
        for slot, _ in started:
            subject.release(slot)
    assert subject.counters.shared_tokens > 100


def test_two_that_wait_for_the_same_one_survive_its_end() -> None:
    params = weights(0)
    subject = engine(params, prefill_dispatches=1, **FIELDS)
    started = [start(subject, i, PROMPT) for i in range(3)]
    subject.run_once()
    assert subject.counters.prefill_tokens < len(PROMPT), "the first is still reading"
    subject.release(started[0][0])
    run_until_parked(subject)
    check(subject, started[1:], params)

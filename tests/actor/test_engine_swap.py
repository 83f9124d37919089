"""Weights change under conversations: whose turn goes on with what, and what each token's version says."""

import numpy as np
import pytest

from tests.actor.support import engine, expected_logprobs, run_until_parked, weights
from tunix_core.actor.engine import Engine
from tunix_core.actor.policy_engine import Request
from tunix_core.actor.sampling import request_key

OLD, NEW, NEWEST = weights(0), weights(1), weights(2)
PARAMS = {0: OLD, 5: NEW, 9: NEWEST}
PROMPT = [256, 65, 66, 67, 68, 69, 70, 257]


def check_every_token(subject: Engine, slot: int) -> set[int]:
    """Each policy token's logprob is that of its version over a whole prefix read by that version."""
    length = int(subject.transcripts.lengths[slot])
    mask = subject.transcripts.loss_mask[slot, :length]
    versions = subject.transcripts.versions[slot, :length]
    found = set(versions[mask].tolist())
    for version in found:
        mine = mask & (versions == version)
        expected = expected_logprobs(PARAMS[version], subject.transcripts.tokens[slot, :length], 1.0)
        np.testing.assert_allclose(subject.transcripts.logprobs[slot, :length][mine], expected[mine], atol=2e-5)
    return found


def start(subject: Engine, num: int = 3) -> list[int]:
    slots = [subject.acquire(Request(key=request_key("swap", i), temperature=1.0)) for i in range(num)]
    for slot in slots:
        subject.begin_turn(slot, PROMPT)
    return slots


def test_a_turn_ends_with_the_weights_it_began_with() -> None:
    subject = engine(OLD, 0, swap_policy="turn")
    slots = start(subject)
    subject.run_once()
    assert subject.busy, "the turns must be under way"
    subject.swap(NEW, 5)
    assert not subject.can_swap(), "the old weights still speak"
    late = subject.acquire(Request(key=request_key("late"), temperature=1.0))
    subject.begin_turn(late, PROMPT)
    run_until_parked(subject)
    for slot in slots:
        assert check_every_token(subject, slot) == {0}
    assert check_every_token(subject, late) == {5}
    assert subject.can_swap()


def test_at_the_turn_boundary_the_prefix_is_read_again() -> None:
    subject = engine(OLD, 0, swap_policy="turn")
    slots = start(subject)
    run_until_parked(subject)
    subject.swap(NEW, 5)
    cached = [int(subject.transcripts.lengths[slot]) - 1 for slot in slots]
    for slot in slots:
        subject.begin_turn(slot, [48, 257])
    run_until_parked(subject)
    assert subject.counters.recomputed_tokens == sum(cached)
    for slot in slots:
        assert check_every_token(subject, slot) == {0, 5}


def test_immediate_goes_on_with_the_new_weights() -> None:
    subject = engine(OLD, 0, swap_policy="immediate")
    slots = start(subject)
    subject.run_once()
    assert subject.busy
    subject.swap(NEW, 5)
    assert subject.can_swap(), "the old weights are gone at once"
    run_until_parked(subject)
    mixed = [check_every_token(subject, slot) for slot in slots]
    assert {0, 5} in mixed
    assert subject.counters.recomputed_tokens > 0


def test_a_swap_amid_a_long_prefill_starts_it_over() -> None:
    subject = engine(OLD, 0, swap_policy="turn", prefill_dispatches=4)
    slot = subject.acquire(Request(key=request_key("long"), temperature=1.0))
    subject.begin_turn(slot, [256, *range(60, 80), 257])
    subject.run_once()
    assert subject.counters.prefill_tokens == 20
    subject.swap(NEW, 5)
    run_until_parked(subject)
    assert check_every_token(subject, slot) == {5}


@pytest.mark.parametrize("policy", ["turn", "immediate"])
def test_swaps_in_a_row(policy: str) -> None:
    subject = engine(OLD, 0, swap_policy=policy)
    slots = start(subject)
    for version in (5, 9):
        subject.run_once()
        while not subject.can_swap():
            subject.run_once()
        subject.swap(PARAMS[version], version)
    run_until_parked(subject)
    for slot in slots:
        subject.begin_turn(slot, [48, 257])
    run_until_parked(subject)
    for slot in slots:
        assert max(check_every_token(subject, slot)) == 9


def test_the_same_weights_under_a_new_version_change_no_sample() -> None:
    drawn = []
    for swaps in (False, True):
        subject = engine(OLD, 0, swap_policy="immediate")
        slots = start(subject)
        while subject.busy:
            subject.run_once()
            if swaps:
                subject.swap(OLD, subject.version + 1)
        drawn.append([subject.transcripts.tokens[slot, : subject.transcripts.lengths[slot]].tolist() for slot in slots])
    assert drawn[0] == drawn[1]

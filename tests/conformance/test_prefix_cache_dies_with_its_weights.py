"""Cached keys and values of old weights served after a swap (NeMo-RL #4018, prime-rl #2270)."""

import numpy as np
import pytest

from tests.actor.support import engine, run_until_parked, weights
from tunix_core.actor.engine import Engine
from tunix_core.actor.policy_engine import Conversation, Request
from tunix_core.actor.sampling import request_key

PROMPT = [256, *range(60, 80), 257]


def ask(subject: Engine, name: str) -> tuple[int, Conversation]:
    slot = subject.acquire(Request(key=request_key("conformance", name)))
    subject.begin_turn(slot, PROMPT)
    run_until_parked(subject)
    return slot, subject.transcripts.conversation(slot)


@pytest.mark.parametrize("policy", ["turn", "immediate", "finish"])
def test_prefix_cache_dies_with_its_weights(policy: str) -> None:
    """Same prompt across a swap: tokens and log-probabilities equal those of an engine that never had other weights."""
    old, new = weights(0), weights(1)
    subject = engine(old, swap_policy=policy, shared_prefix_tokens=4)
    held, before = ask(subject, "before")  # keeps its slot and its cache over the swap
    subject.release(ask(subject, "given back")[0])
    assert subject.counters.shared_tokens == len(PROMPT) - 1
    subject.swap(new, 7)
    _, after = ask(subject, "after")
    assert subject.counters.shared_tokens == len(PROMPT) - 1, "nothing under the new weights to share yet"
    _, again = ask(subject, "again")
    assert subject.counters.shared_tokens == 2 * (len(PROMPT) - 1)
    for name, found in (("after", after), ("again", again)):
        _, cold = ask(engine(new), name)
        assert found.tokens.tolist() == cold.tokens.tolist()
        np.testing.assert_allclose(found.logprobs, cold.logprobs, atol=2e-5)
        assert set(found.versions[found.loss_mask].tolist()) == {7}
    subject.begin_turn(held, [48, 257])
    run_until_parked(subject)
    late = subject.transcripts.conversation(held).versions[len(before.tokens) + 2 :]
    assert set(late.tolist()) == {0 if policy == "finish" else 7}

"""Stored log-probabilities equal a full forward recomputation, whatever happened on the way."""

import numpy as np
import pytest

from tests.actor.dialogues import SAMPLING, VARIED, check_logprobs, mixed_requests, play_at_random
from tests.actor.support import engine, weights

POOL = [weights(seed) for seed in (1, 2, 3)]


@pytest.mark.parametrize("policy", ["turn", "immediate", "finish"])
def test_random_dialogues_under_every_setting(policy: str) -> None:
    subject = engine(weights(0), sampling="any", swap_policy=policy, max_resident_versions=3, **VARIED)
    found = play_at_random(subject, np.random.default_rng(5), POOL, mixed_requests(21, f"all-{policy}", SAMPLING))
    known = {0: weights(0), **found["weights"]}
    seen = [check_logprobs(played, known) for played in found["played"]]
    assert len(seen) == 21
    assert len(set.union(*seen)) > 3, "swaps happened"
    assert (max(map(len, seen)) > 1) == (policy != "finish")
    assert subject.counters.shared_tokens > 0
    assert subject.counters.discarded_tokens > 0
    assert (subject.counters.recomputed_tokens > 0) == (policy != "finish")


def test_ends_say_why() -> None:
    subject = engine(weights(0), sampling="any", **VARIED)
    found = play_at_random(subject, np.random.default_rng(6), POOL, mixed_requests(21, "ends", SAMPLING))
    reasons = set()
    for request, conversation, ends in found["played"]:
        for end in ends:
            said = conversation.tokens[end.start : end.end].tolist()
            assert conversation.loss_mask[end.start : end.end].all()
            text = bytes(token for token in said if token < 256).decode("utf-8", "replace")
            hit = any(string in text for string in request.stop_strings)
            expected = {257: "end_of_turn", 90: "stop_string" if hit else "stop_id"}.get(said[-1])
            assert end.stopped == (said[-1] == 257)
            assert end.reason == (expected or ("stop_string" if hit else end.reason))
            assert not {257, 90} & set(said[:-1])
            if end.reason == "context":
                assert end.end == subject.context_tokens
            reasons.add(end.reason)
    assert reasons >= {"end_of_turn", "stop_id", "stop_string", "turn_limit"}

"""Same key for every request, identical samples, zero advantage (google-tunix, measured)."""

import numpy as np

from tests.actor.scripted import run_actor
from tests.actor.support import engine, run_until_parked, weights
from tunix_core.actor.policy_engine import Request
from tunix_core.actor.sampling import request_key
from tunix_core.storage.store import open_store

PROMPTS = [[256, 65 + i, *range(70, 70 + i), 257] for i in range(8)]


def test_samples_in_a_group_differ(tmp_path) -> None:
    """Members of a group differ at T > 0, through the whole actor."""
    learner, _ = run_actor(open_store(str(tmp_path)), lambda learner: len(learner.groups()) >= 6)
    for members in learner.groups().values():
        texts = [tuple(member.tokens[member.loss_mask].tolist()) for member in members]
        assert len(set(texts)) == len(texts)
        prompts = {tuple(member.tokens[: member.turns[0].end].tolist()) for member in members}
        assert len(prompts) == 1


def test_the_same_request_key_gives_the_same_sample_in_any_batch() -> None:
    """Alone, in a crowd, late among strangers, in another slot: the ids and their log-probabilities are the same."""
    subject = engine(weights(0))

    def play(requests: list[int], *, staggered: bool = False) -> dict[int, tuple[list[int], np.ndarray]]:
        slots = {}
        for request in requests:
            slots[request] = subject.acquire(Request(key=request_key("conformance", request), temperature=0.9))
            subject.begin_turn(slots[request], PROMPTS[request])
            if staggered:
                subject.run_once()
        run_until_parked(subject)
        found = {}
        for request, slot in slots.items():
            mask = subject.transcripts.loss_mask[slot]
            found[request] = (
                subject.transcripts.tokens[slot, mask].tolist(),
                subject.transcripts.logprobs[slot, mask].copy(),
            )
            subject.release(slot)
        return found

    crowd = play(list(range(8)))
    for other in (play([5]), play([7, 6, 5, 4, 3]), play(list(range(7, -1, -1)), staggered=True)):
        for request, (tokens, logprobs) in other.items():
            assert tokens == crowd[request][0]
            np.testing.assert_allclose(logprobs, crowd[request][1], atol=1e-5)
    assert len({tuple(tokens) for tokens, _ in crowd.values()}) == 8

"""Dozens of compilations per step with varying turns (google-tunix, measured)."""

import numpy as np
import pytest

from tests.actor.dialogues import SAMPLING, VARIED, mixed_requests, play_at_random
from tests.actor.support import engine, weights
from tunix_core.distributed.compilation import CompilationCounter


@pytest.mark.parametrize("policy", ["turn", "immediate", "finish"])
def test_multi_turn_does_not_recompile(policy: str) -> None:
    """Any mix of lengths, turns, batch sizes, settings, swaps and stops: zero compilations once the engine is there."""
    pool = [weights(seed) for seed in (1, 2)]
    subject = engine(weights(0), sampling="any", swap_policy=policy, **VARIED)
    counter = CompilationCounter()
    counter.warmed_up()
    for seed, num in enumerate((1, 3, 20, 40)):
        rng = np.random.default_rng(seed)
        play_at_random(subject, rng, pool, mixed_requests(num, f"{policy}-{seed}", SAMPLING))
    assert counter.after_warmup == 0
    counters = subject.counters
    assert min(counters.swaps, counters.shared_tokens, counters.discarded_tokens, counters.extend_dispatches) > 0

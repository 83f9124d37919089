"""Weights not detached (verl #4105)."""

import jax
import numpy as np
import pytest

from tests.learner import step_cases
from tests.learner.objective_oracle import SEQUENCES, algorithm_of, compiled, denominator_of, make_batch, slopes
from tests.learner.step_cases import MAX_TOKENS, make_parameters


@pytest.mark.parametrize("correction", ["truncate", "truncate_sequence", "mask"])
def test_importance_weights_are_constants(correction: str) -> None:
    """The analytic gradient is that of the stated objective: central differences with the weights held."""
    a = algorithm_of({"correction": correction, "kl_coefficient": 0.0})
    params, reference, direction = (make_parameters(seed) for seed in (1, 2, 3))
    current, anchor = (step_cases.logprobs(p, SEQUENCES) for p in (params, reference))
    valid = np.arange(MAX_TOKENS) < SEQUENCES.lengths[:, None]
    move = jax.jvp(
        lambda p: step_cases._logprobs(p, SEQUENCES.tokens, valid, SEQUENCES.temperature), (params,), (direction,)
    )[1]
    held = float((slopes(a, current, anchor) * np.asarray(move, np.float64)).sum())
    _, gradient = compiled(a)(params, reference, make_batch(), denominator_of(a))
    found = sum(float((g * d).sum()) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
    assert found == pytest.approx(held, rel=1e-3)

    # The test can tell: with weights that move along, the derivative is another.
    behavior, mask = SEQUENCES.behavior_logprobs, SEQUENCES.loss_mask
    ratio = np.where(mask, np.exp(current - np.where(mask, behavior, current)), 0)
    if correction == "truncate":
        extra = -SEQUENCES.advantages[:, None] * np.where(ratio < a.importance_truncation, ratio, 0) / mask.sum()
        moving = held + float((extra * np.asarray(move, np.float64)).sum())
        assert abs(moving - held) > 0.05 * abs(held)

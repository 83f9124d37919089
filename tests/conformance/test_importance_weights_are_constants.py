"""Weights not detached (verl #4105)."""

import numpy as np
import pytest

from tests.learner import step_cases
from tests.learner.objective_oracle import (
    SEQUENCES,
    algorithm_of,
    along,
    compiled,
    denominator_of,
    derivative,
    make_batch,
    slopes,
)
from tests.learner.step_cases import make_parameters


@pytest.mark.parametrize("correction", ["truncate", "truncate_sequence", "mask"])
def test_importance_weights_are_constants(correction: str) -> None:
    """The analytic gradient is that of the stated objective: central differences with the weights held."""
    a = algorithm_of({"correction": correction, "kl_coefficient": 0.0})
    params, reference, direction = (make_parameters(seed) for seed in (1, 2, 3))
    current, anchor = (step_cases.logprobs(p, SEQUENCES) for p in (params, reference))
    held = derivative(slopes(a, current, anchor), params, direction)
    _, gradient = compiled(a)(params, reference, make_batch(), denominator_of(a))
    assert along(gradient, direction) == pytest.approx(held, rel=1e-3)

    # The test can tell: with weights that move along, the derivative is another.
    behavior, mask = SEQUENCES.behavior_logprobs, SEQUENCES.loss_mask
    ratio = np.where(mask, np.exp(current - np.where(mask, behavior, current)), 0)
    if correction == "truncate":
        extra = -SEQUENCES.advantages[:, None] * np.where(ratio < a.importance_truncation, ratio, 0) / mask.sum()
        assert abs(derivative(extra, params, direction)) > 0.05 * abs(held)

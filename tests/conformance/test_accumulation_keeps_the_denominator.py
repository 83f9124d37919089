"""Loss normalised per micro-batch (TRL #6024, #7206, ms-swift #10117)."""

import itertools

import jax
import numpy as np
import pytest

from tests.learner.objective_oracle import algorithm_of, compiled, denominator_of, make_batch
from tests.learner.step_cases import make_parameters
from tunix_core.rl import aggregation


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "constant_length"])
@pytest.mark.parametrize("cuts", [[4], [3, 6]], ids=["even", "ragged"])
def test_accumulation_keeps_the_denominator(kind: aggregation.Aggregation, cuts: list[int]) -> None:
    """Loss and gradient of 8 windows are the sums over micro-batches of any size, for each aggregation.

    The compiled step and any mesh: `tests/learner/test_train_step.py`.
    """
    a = algorithm_of({"aggregation": kind})
    params, reference, batch = make_parameters(1), make_parameters(2), make_batch()
    whole = compiled(a)(params, reference, batch, denominator_of(a))
    edges = [0, *cuts, 8]
    parts = [
        compiled(a)(params, reference, jax.tree.map(lambda x: x[start:stop], batch), denominator_of(a))  # noqa: B023
        for start, stop in itertools.pairwise(edges)
    ]
    total = jax.tree.map(lambda *leaves: sum(leaves), *parts)
    for found, wanted in zip(jax.tree.leaves(total), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())

"""Masked-out tokens counted or not, inconsistently (slime #657, verl #3915)."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.learner import step_cases
from tests.learner.objective_oracle import SEQUENCES, algorithm_of, compiled, denominator_of, make_batch
from tests.learner.step_cases import make_parameters
from tunix_core.rl import aggregation


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "constant_length"])
def test_rejected_tokens_follow_the_stated_denominator(kind: aggregation.Aggregation) -> None:
    """Half of the tokens rejected: they add nothing to the sum and stay in the denominator."""
    a = algorithm_of({"correction": "mask", "aggregation": kind, "kl_coefficient": 0.0})
    params, reference = make_parameters(1), make_parameters(2)
    current = step_cases.logprobs(params, SEQUENCES).astype(np.float32)
    rejected = SEQUENCES.loss_mask & (np.cumsum(SEQUENCES.loss_mask, axis=1) % 2 == 0)
    # A rejected token was far likelier for the sampler than for the learner; the others were as likely.
    behavior = np.where(SEQUENCES.loss_mask, current + np.where(rejected, 5.0, 0.0), 0).astype(np.float32)
    arrays = dataclasses.replace(SEQUENCES, behavior_logprobs=behavior).pack(num_windows=8)
    batch = make_batch()._replace(behavior_logprobs=jnp.asarray(arrays.behavior_logprobs))
    loss, _ = compiled(a)(params, reference, batch, denominator_of(a))

    kept = SEQUENCES.loss_mask & ~rejected
    assert rejected.sum() > 0.3 * SEQUENCES.loss_mask.sum()
    sums = -(SEQUENCES.advantages[:, None] * kept).sum(axis=1)  # weight and ratio are 1
    lengths = SEQUENCES.loss_mask.sum(axis=1)
    expected = {
        "token_mean": sums.sum() / lengths.sum(),
        "sequence_mean": (sums / lengths).mean(),
        "constant_length": sums.sum() / (len(sums) * a.constant_tokens),
    }[kind]
    assert float(loss) == pytest.approx(expected, rel=1e-5)

"""Temperature 1 logprobs compared with temperature 0.7 samples (TRL #4159, prime-rl #2600)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.actor.support import MODEL, engine, run_until_parked, weights
from tunix_core.actor.policy_engine import Request
from tunix_core.actor.sampling import request_key
from tunix_core.config import AlgorithmConfig
from tunix_core.config_loading import load_recipe
from tunix_core.data.packing import best_fit, pack
from tunix_core.errors import ConfigError
from tunix_core.learner.objectives import Batch, finalize, policy_objective

PROMPT = [256, 65, 66, 67, 257]
NUM_SLOTS = 8


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampling_temperature_is_the_logprob_temperature(temperature: float) -> None:
    """What the actor's engine sampled, the learner's objective with the same weights finds at ratio 1."""
    params = jax.tree.map(jnp.asarray, weights(0))
    sampler = engine(params)
    slots = [
        sampler.acquire(Request(key=request_key("temperature", i), temperature=temperature)) for i in range(NUM_SLOTS)
    ]
    for slot in slots:
        sampler.begin_turn(slot, PROMPT)
    run_until_parked(sampler)
    lengths = sampler.transcripts.lengths[slots]

    def joined(rows: np.ndarray) -> np.ndarray:
        return np.concatenate([rows[slot, :length] for slot, length in zip(slots, lengths, strict=True)])

    layout = best_fit(lengths, 48)
    arrays = pack(
        layout,
        lengths,
        tokens=joined(sampler.transcripts.tokens),
        loss_mask=joined(sampler.transcripts.loss_mask),
        behavior_logprobs=joined(sampler.transcripts.logprobs),
        advantages=np.ones(NUM_SLOTS, np.float32),
        temperature=np.full(NUM_SLOTS, temperature, np.float32),
        num_windows=layout.num_windows,
        window_tokens=48,
    )
    batch = jax.tree.map(jnp.asarray, Batch(*(getattr(arrays, name) for name in Batch._fields)))
    objective = policy_objective(MODEL, AlgorithmConfig())
    measure = jax.jit(lambda b: finalize(objective(params, params, b, jnp.float32(1.0))[1]))
    figures = measure(batch)
    assert figures["policy_tokens"] >= NUM_SLOTS
    assert figures["max_logprob_gap"] < 2e-5
    assert figures["importance_ratio"] == pytest.approx(1, abs=1e-5)
    other = measure(batch._replace(temperature=batch.temperature * 1.3))
    assert other["max_logprob_gap"] > 0.01, "the test can tell one temperature from another"


@pytest.mark.parametrize("option", ["actor.top_k", "actor.top_p", "algorithm.top_p", "algorithm.min_p"])
def test_truncated_sampling_is_refused_for_training(option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        load_recipe("lookup", {option: 0.9})

"""NaN from an empty mask (unsloth-zoo #1286, prime-rl #1961)."""

import jax
import numpy as np

from tests.learner.step_cases import make_config, make_parameters, make_sequences
from tunix_core.config import OptimizerConfig
from tunix_core.distributed.mesh import make_mesh
from tunix_core.learner.train_step import make_train_step


def test_all_masked_batch_is_harmless() -> None:
    """No policy token at all: zero gradient, the same parameters, counted as 0 tokens, nothing that is not finite.

    A shard with log probabilities that are NaN or null never gets here: `tests/storage/test_shards.py`.
    """
    config = make_config(optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.0))
    step = make_train_step(config, make_mesh(config.mesh))
    step.compile(8)
    batch = make_sequences().pack(num_windows=8)
    masked = batch._replace(loss_mask=np.zeros_like(batch.loss_mask))
    before = step.init_state(make_parameters(1))
    kept = jax.tree.map(np.array, before.params)
    after, metrics = step(before, step.put_reference(make_parameters(2)), step.put(masked), 0.0)
    figures = {name: float(value) for name, value in metrics.items()}
    assert all(np.isfinite(value) for value in figures.values()), figures
    assert (figures["policy_tokens"], figures["gradient_norm"], figures["loss"], figures["nonfinite"]) == (0, 0, 0, 0)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, after.params), kept)
    assert int(after.step) == 1

"""Tool tokens leaked into KL, return or reward (slime #1370, verl #6392, SkyRL #710)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_core.config import AlgorithmConfig, ModelConfig
from tunix_core.learner.objectives import Batch, finalize, policy_objective, supervised_objective
from tunix_core.models.decoder import init_parameters

MODEL = ModelConfig()
MASK = np.array(
    [[False, False, True, True, False, True, False, False]]
)  # a prompt, a tool's answer, padding at the end
BATCH = Batch(
    tokens=np.arange(8, dtype=np.int32)[None],
    positions=np.array([[0, 1, 2, 3, 4, 5, 6, 0]], np.int32),
    segment_ids=np.array([[1, 1, 1, 1, 1, 1, 1, 0]], np.int32),
    loss_mask=MASK,
    behavior_logprobs=np.full((1, 8), -5.0, np.float32),
    advantages=np.ones((1, 8), np.float32),
    temperature=np.ones((1, 8), np.float32),
    equal_version=MASK,
)
PARAMS = jax.tree.map(jnp.asarray, init_parameters(MODEL, 0))
REFERENCE = jax.tree.map(jnp.asarray, init_parameters(MODEL, 1))


OBJECTIVES = {
    "policy": policy_objective(MODEL, AlgorithmConfig(kl_coefficient=0.1)),
    "supervised": supervised_objective(MODEL),
}


@functools.partial(jax.jit, static_argnums=0)
def everything(name: str, batch: Batch):
    def loss(params):
        part, sums = OBJECTIVES[name](params, REFERENCE, batch, jnp.float32(3.0))
        return part, finalize(sums)

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(PARAMS)
    return value, metrics, gradient


@pytest.mark.parametrize("name", ["policy", "supervised"])
@pytest.mark.parametrize("field", ["behavior_logprobs", "advantages", "temperature"])
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 0.0, 1e30])
def test_tool_tokens_cannot_matter(name: str, field: str, junk: float) -> None:
    dirty = BATCH._replace(**{field: np.where(MASK, getattr(BATCH, field), np.float32(junk))})
    clean_leaves, dirty_leaves = (jax.tree.leaves(everything(name, batch)) for batch in (BATCH, dirty))
    assert len(clean_leaves) > 10
    for expected, received in zip(clean_leaves, dirty_leaves, strict=True):
        assert np.isfinite(np.asarray(expected)).all()
        np.testing.assert_array_equal(received, expected)


def test_a_policy_token_does_matter() -> None:
    """So that the test above can fail."""
    changed = BATCH._replace(advantages=np.where(MASK, 2 * BATCH.advantages, BATCH.advantages))
    assert everything("policy", changed)[0] != everything("policy", BATCH)[0]

"""Low-rank adapters: off they are the base, unmerged they equal the merged weights, and only they are trained."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from tests.models.support import window_logits
from tunix_core.distributed.compilation import QUICK_ON_CPU
from tunix_core.errors import ConfigError
from tunix_core.model_config import ModelConfig
from tunix_core.models import decoder, huggingface, parameters

BASE = ModelConfig(vocab_size=23, model_width=16, num_layers=2, num_heads=4, num_kv_heads=2, head_width=8, mlp_width=24)
ADAPTED = dataclasses.replace(BASE, lora_rank=3, lora_alpha=6.0)
TOKENS = np.random.default_rng(0).integers(0, 23, (2, 12)).astype(np.int32)


def logits(config: ModelConfig, params: decoder.Params) -> np.ndarray:
    return window_logits(config, params, TOKENS, compiler_options=QUICK_ON_CPU)


def trained(seed: int = 3) -> decoder.Params:
    """Adapters as after some training: B is not zero any more."""
    adapters = parameters.adapters(parameters.init_parameters(ADAPTED, seed))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: np.asarray(leaf) + rng.normal(size=leaf.shape).astype(np.float32) * 0.1, adapters)


def test_fresh_adapters_change_nothing() -> None:
    whole = parameters.init_parameters(ADAPTED, 1)
    base = parameters.base_parameters(whole)
    assert jax.tree.structure(base) == jax.tree.structure(parameters.abstract_parameters(BASE))
    np.testing.assert_array_equal(logits(ADAPTED, whole), logits(BASE, base))


def test_unmerged_equals_merged() -> None:
    base = parameters.init_parameters(BASE, 1)
    whole = parameters.adapted(ADAPTED, trained(), base)
    merged = huggingface.merged(ADAPTED, parameters.flatten_parameters(whole))
    assert merged.keys() == parameters.flatten_parameters(base).keys()
    adapted = logits(ADAPTED, whole)
    np.testing.assert_allclose(adapted, logits(BASE, parameters.unflatten_parameters(BASE, merged)), atol=1e-5)
    assert np.abs(adapted - logits(BASE, base)).max() > 1e-2


@pytest.mark.parametrize("targets", [("query", "value"), ("down",)])
def test_only_the_targets_have_adapters(targets: tuple[str, ...]) -> None:
    config = dataclasses.replace(ADAPTED, lora_targets=targets)
    names = parameters.named_leaves(parameters.trained_parameters(config))
    assert {name.split(".")[2] for name in names} == set(targets)
    assert all(name.endswith((".lora_a", ".lora_b")) for name in names)


def test_serving_trees_combine_layer_by_layer() -> None:
    base, adapters = parameters.init_parameters(BASE, 1), trained()
    one = decoder.serving_parameters(parameters.adapted(ADAPTED, adapters, base))
    other = parameters.adapted(ADAPTED, decoder.serving_parameters(adapters), decoder.serving_parameters(base))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(left, right)


def test_settings_that_cannot_act_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.lora_targets"):
        dataclasses.replace(ADAPTED, lora_targets=())
    with pytest.raises(ConfigError, match=r"model\.lora_targets.*router"):
        dataclasses.replace(ADAPTED, lora_targets=("router",))
    with pytest.raises(ConfigError, match="Experts have no adapters"):
        dataclasses.replace(ADAPTED, num_experts=4, experts_per_token=2)

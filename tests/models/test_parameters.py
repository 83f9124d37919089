"""Initial values, and names on disk."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tunix_core.config import ModelConfig
from tunix_core.errors import DataError
from tunix_core.models import parameters

CONFIG = ModelConfig(model_width=64, num_layers=8, num_heads=4, num_kv_heads=2, head_width=16, mlp_width=96)


@functools.cache
def initial(seed: int) -> dict[str, np.ndarray]:
    return parameters.flatten_parameters(parameters.init_parameters(CONFIG, seed))


def test_initial_scales() -> None:
    tensors = initial(0)
    for name, tensor in tensors.items():
        if name.endswith(".scale"):
            np.testing.assert_array_equal(tensor, 1, err_msg=name)
            continue
        # Two residual branches per layer, 8 layers: 1 / sqrt(16).
        expected = 0.02 / 4 if name.endswith((".output.weight", ".down.weight")) else 0.02
        assert tensor.std() == pytest.approx(expected, rel=0.05), name
        assert abs(tensor.mean()) < expected / 10, name
    per_layer = tensors["blocks.mlp.up.weight"]
    assert not np.array_equal(per_layer[0], per_layer[1]), "every layer has draws of its own"


def test_the_seed_decides() -> None:
    first, other = initial(4), initial(5)
    same = parameters.flatten_parameters(parameters.init_parameters(CONFIG, seed=4))
    assert all(np.array_equal(first[name], same[name]) for name in first)
    assert not np.array_equal(first["embedding"], other["embedding"])


def test_names_and_shapes_on_disk() -> None:
    """A policy file written today must load tomorrow: a changed name is a broken run."""
    abstract = parameters.abstract_parameters(ModelConfig())
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
    tensors = parameters.flatten_parameters(params)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "blocks.attention.key.weight": (3, 128, 64),
        "blocks.attention.output.weight": (3, 128, 128),
        "blocks.attention.query.weight": (3, 128, 128),
        "blocks.attention.value.weight": (3, 128, 64),
        "blocks.attention_norm.scale": (3, 128),
        "blocks.mlp.down.weight": (3, 384, 128),
        "blocks.mlp.gate.weight": (3, 128, 384),
        "blocks.mlp.up.weight": (3, 128, 384),
        "blocks.mlp_norm.scale": (3, 128),
        "embedding": (272, 128),
        "final_norm.scale": (128,),
        "head": (128, 272),
    }
    assert all(isinstance(tensor, np.ndarray) and tensor.dtype == np.float32 for tensor in tensors.values())


def test_flatten_and_unflatten_are_inverse() -> None:
    params = jax.device_get(parameters.init_parameters(CONFIG, seed=0))
    again = parameters.unflatten_parameters(CONFIG, initial(0))
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_a_tensor_missing_surplus_or_misshapen_is_named() -> None:
    tensors = initial(0)
    without = {name: tensor for name, tensor in tensors.items() if name != "head"}
    with pytest.raises(DataError, match=r"missing \['head'\], surplus none"):
        parameters.unflatten_parameters(CONFIG, without)
    with pytest.raises(DataError, match=r"missing none, surplus \['lm_head'\]"):
        parameters.unflatten_parameters(CONFIG, {**tensors, "lm_head": tensors["head"]})
    with pytest.raises(DataError, match=r"parameters\.head: received float32\[272, 64\], accepted float32\[64, 272\]"):
        parameters.unflatten_parameters(CONFIG, {**tensors, "head": tensors["head"].T})
    with pytest.raises(DataError, match=r"parameters\.embedding: received float64"):
        parameters.unflatten_parameters(CONFIG, {**tensors, "embedding": tensors["embedding"].astype(np.float64)})
    narrow = dataclasses.replace(CONFIG, vocab_size=100)
    with pytest.raises(
        DataError, match=r"parameters\.embedding: received float32\[272, 64\], accepted float32\[100, 64\]"
    ):
        parameters.unflatten_parameters(narrow, tensors)

"""Each family against `transformers` (golden logits, see `parity`), and the translation there and back."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from tests.models.parity import families
from tests.models.support import window_logits
from tunix_core.distributed.compilation import QUICK_ON_CPU
from tunix_core.errors import DataError
from tunix_core.model_config import ModelConfig
from tunix_core.models import decoder, huggingface, parameters

GOLDENS = Path(os.environ.get("TUNIX_GOLDENS", Path(__file__).parent / "goldens"))
FAMILIES = sorted(families.FAMILIES)


@functools.cache
def model(family: str) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Configuration and their tensors."""
    config = huggingface.model_config(families.config(family))
    shapes = {}
    expected = parameters.named_leaves(parameters.abstract_parameters(config))
    for ours, place in huggingface.places(config).items():
        for index, theirs in huggingface.their_names(config, place):
            shape = expected[ours].shape[len(index) :]
            shapes[theirs] = shape[::-1] if place.transposed else shape
    return config, families.weights(shapes)


@functools.cache
def params(family: str) -> decoder.Params:
    config, theirs = model(family)
    return parameters.unflatten_parameters(config, huggingface.from_hf(config, theirs, theirs.__getitem__))


packed_logits = functools.partial(window_logits, compiler_options=QUICK_ON_CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str) -> None:
    golden = safetensors.numpy.load_file(GOLDENS / f"{family}.safetensors")["logits"]
    config, _ = model(family)
    got = packed_logits(config, params(family), families.tokens(family))
    assert np.abs(golden).max() > 1
    assert np.abs(got - golden).max() < 1e-4


@pytest.mark.parametrize("backend", ["dense", "blocks", "segments"])
@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_local_layers_and_softcaps_on_every_backend(family: str, backend: Any) -> None:
    golden = safetensors.numpy.load_file(GOLDENS / f"{family}.safetensors")["logits"]
    config = dataclasses.replace(model(family)[0], attention=backend)
    assert np.abs(packed_logits(config, params(family), families.tokens(family)) - golden).max() < 1e-4


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "qwen3_moe", "gemma2", "gemma3"])
def test_the_cache_gives_the_same_logits(family: str) -> None:
    """Prefill of 30 tokens in two chunks, then ten decode steps, longer than the sliding window."""
    config, _ = model(family)
    tokens = families.tokens(family).astype(np.int32)
    expected = packed_logits(config, params(family), tokens)
    cache = decoder.init_cache(config, 2, 48)
    slots = jnp.arange(2)
    extend = jax.jit(decoder.extend, static_argnums=1)
    decode = jax.jit(decoder.decode, static_argnums=1)
    serving = decoder.serving_parameters(params(family))
    for start in (0, 15):
        full = jnp.full(2, 15)
        cache, logits = extend(serving, config, cache, slots, tokens[:, start : start + 15], jnp.full(2, start), full)
        np.testing.assert_allclose(logits, expected[:, start + 14], atol=1e-4)
    for position in range(30, 40):
        cache, logits = decode(serving, config, cache, tokens[:, position], jnp.full(2, position))
        np.testing.assert_allclose(logits, expected[:, position], atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_gives_the_same_bits(family: str) -> None:
    config, theirs = model(family)
    back = dict(huggingface.to_hf(config, huggingface.from_hf(config, theirs, theirs.__getitem__)))
    assert back.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.tobytes() == back[name].tobytes(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_configurations_go_there_and_back(family: str) -> None:
    config, _ = model(family)
    again = huggingface.model_config(huggingface.hf_config(config, context_tokens=256))
    assert not huggingface.differences(config, again)


def test_an_architecture_that_cannot_say_it_is_refused() -> None:
    config = dataclasses.replace(model("qwen3")[0], architecture="llama")
    with pytest.raises(DataError, match="cannot express query_key_norm"):
        huggingface.hf_config(config, context_tokens=256)


def test_missing_surplus_and_misshapen_tensors_are_refused_by_name() -> None:
    config, theirs = model("qwen2_5")

    def load(tensors: dict[str, np.ndarray]) -> None:
        huggingface.from_hf(config, tensors, tensors.__getitem__)

    bias = "model.layers.1.self_attn.k_proj.bias"
    with pytest.raises(DataError, match=f"missing {bias}"):
        load({name: tensor for name, tensor in theirs.items() if name != bias})
    with pytest.raises(DataError, match=r"surplus model.layers.0.self_attn.o_proj.bias"):
        load({**theirs, "model.layers.0.self_attn.o_proj.bias": np.zeros(32, np.float32)})
    with pytest.raises(DataError, match=rf"{bias}: received \[5\], accepted \[16\]"):
        load({**theirs, bias: np.zeros(5, np.float32)})
    with pytest.raises(DataError, match=f"{bias}: holds a number that is not finite"):
        load({**theirs, bias: np.full(16, np.nan, np.float32)})


def test_a_tied_head_in_the_file_must_be_the_embedding() -> None:
    config, theirs = model("llama3_tied")
    embedding = theirs["model.embed_tokens.weight"]
    same = {**theirs, "lm_head.weight": embedding}
    assert "head" not in huggingface.from_hf(config, same, same.__getitem__)
    other = {**theirs, "lm_head.weight": embedding + 1}
    with pytest.raises(DataError, match="differs from the embedding"):
        huggingface.from_hf(config, other, other.__getitem__)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mistral"}, "model_type: received 'mistral'"),
        ({"hidden_act": "relu"}, "hidden_act: received 'relu'"),
        ({"mlp_bias": True}, "mlp_bias: received True"),
        ({"attention_bias": True}, "attention_bias: received True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type: received 'yarn'"),
        ({"hidden_size": None}, ""),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(change: dict[str, Any], said: str) -> None:
    values = {**families.config("llama3"), **change}
    if "hidden_size" in change:
        del values["hidden_size"]
        said = "hidden_size: missing"
    with pytest.raises(DataError, match=said):
        huggingface.model_config(values)


def test_layer_types_that_follow_no_period_are_refused() -> None:
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    with pytest.raises(DataError, match="layer_types"):
        huggingface.model_config({**families.config("gemma2"), "layer_types": types})


def test_newer_configuration_files_say_the_same() -> None:
    """`rope_parameters` in place of `rope_theta`, `rope_scaling` and `rope_local_base_freq`."""
    old = families.config("gemma3")
    full = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1_000_000.0}
    local = {"rope_type": "default", "rope_theta": 10_000.0}
    new = {k: v for k, v in old.items() if not k.startswith("rope_")}
    new["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    assert huggingface.model_config(new) == huggingface.model_config(old)

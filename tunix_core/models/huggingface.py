"""Translation between `ModelConfig` with its tensors and Hugging Face's `config.json` with theirs.

One table says where each of our tensors lies in theirs. Weights are transposed (they keep
`[out, in]`), layers and experts are stacked here. A translation there and back gives the same bits.
What the decoder does not compute is refused by name, never dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tunix_core.errors import DataError
from tunix_core.model_config import ModelConfig
from tunix_core.models.parameters import abstract_parameters, named_leaves

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_MODEL_TYPES = {"gemma3_text": "gemma3"}
"""Where `model_type` is called otherwise than here."""

LM_HEAD = "lm_head.weight"

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


# ---- config.json -------------------------------------------------------------------------------


def _refuse(field: str, received: object, accepted: str) -> None:
    raise DataError(
        f"config.json: {field}: received {received!r}, accepted {accepted}. The decoder computes nothing else."
    )


def _expect(values: Mapping[str, Any], field: str, *accepted: object) -> None:
    if field in values and values[field] not in accepted:
        _refuse(field, values[field], " or ".join(map(repr, accepted)))


def model_config(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration that a `config.json` describes.

    Raises:
        DataError: an architecture or an option that the decoder does not compute, or a missing field.
    """
    kind = values.get("model_type")
    architecture = _MODEL_TYPES.get(str(kind), str(kind))
    if architecture not in ARCHITECTURES:
        known = sorted({*ARCHITECTURES, *_MODEL_TYPES} - {"gemma3"})
        _refuse("model_type", kind, ", ".join(known))
    options: dict[str, tuple[object, ...]] = {
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
        "mlp_only_layers": ([], None),
        "decoder_sparse_step": (1,),
        "use_bidirectional_attention": (False, None),
        "attention_bias": (False,),
    }
    for field, accepted in options.items():
        _expect(values, field, *accepted)
    try:
        fields = _common(architecture, values)
        fields |= _positions(architecture, values)
        fields |= _of_family(architecture, values)
    except KeyError as error:
        raise DataError(
            f"config.json: {error.args[0]}: missing. Take the file that was saved with the weights."
        ) from None
    return ModelConfig(**fields)


def _common(architecture: str, values: Mapping[str, Any]) -> dict[str, Any]:
    heads, width = values["num_attention_heads"], values["hidden_size"]
    activation = values.get("hidden_activation") or values.get("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        _refuse("hidden_act", activation, ", ".join(_ACTIVATIONS))
    return {
        "architecture": architecture,
        "vocab_size": values["vocab_size"],
        "model_width": width,
        "num_layers": values["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": values.get("num_key_value_heads") or heads,
        "head_width": values.get("head_dim") or width // heads,
        "mlp_width": values["intermediate_size"],
        "activation": _ACTIVATIONS[activation],
        "norm_epsilon": float(values["rms_norm_eps"]),
        "tied_embeddings": bool(values.get("tie_word_embeddings", False)),
    }


def _positions(architecture: str, values: Mapping[str, Any]) -> dict[str, Any]:
    parameters = values.get("rope_parameters") or {}
    local_theta = values.get("rope_local_base_freq")
    if "full_attention" in parameters:
        local = parameters.get("sliding_attention") or {}
        local_theta = local.get("rope_theta", local_theta)
        if local.get("rope_type", "default") != "default":
            _refuse("rope_parameters.sliding_attention.rope_type", local["rope_type"], "'default'")
        parameters = parameters["full_attention"]
    scaling = {**(values.get("rope_scaling") or {}), **parameters}
    theta = scaling.get("rope_theta", values.get("rope_theta", 10_000.0))
    fields: dict[str, Any] = {"rope_theta": float(theta)}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        _refuse("rope_type", kind, "'default', 'linear' or 'llama3'")
    if kind != "default":
        fields |= {"rope_scaling": kind, "rope_factor": float(scaling["factor"])}
    if kind == "llama3":
        fields |= {
            "rope_low_frequency_factor": float(scaling["low_freq_factor"]),
            "rope_high_frequency_factor": float(scaling["high_freq_factor"]),
            "rope_original_tokens": int(scaling["original_max_position_embeddings"]),
        }
    if architecture == "gemma3":
        fields["local_rope_theta"] = float(local_theta or 10_000.0)
    return fields


def _of_family(architecture: str, values: Mapping[str, Any]) -> dict[str, Any]:
    if architecture == "qwen2":
        return {"attention_bias": True}
    if architecture == "qwen3":
        return {"query_key_norm": True}
    if architecture == "qwen3_moe":
        return {
            "query_key_norm": True,
            "mlp_width": values["moe_intermediate_size"],
            "num_experts": values["num_experts"] if "num_experts" in values else values["num_local_experts"],
            "experts_per_token": values["num_experts_per_tok"],
            "normalize_expert_weights": bool(values.get("norm_topk_prob", False)),
        }
    if architecture not in ("gemma2", "gemma3"):
        return {}
    return {
        "tied_embeddings": bool(values.get("tie_word_embeddings", True)),
        "unit_offset_norms": True,
        "post_norms": True,
        "scaled_embeddings": True,
        "query_key_norm": architecture == "gemma3",
        "query_scale_width": int(values.get("query_pre_attn_scalar") or 0),
        "attention_softcap": float(values.get("attn_logit_softcapping") or 0),
        "logit_softcap": float(values.get("final_logit_softcapping") or 0),
        "sliding_window": int(values["sliding_window"]),
        "sliding_period": _period(architecture, values),
    }


def _period(architecture: str, values: Mapping[str, Any]) -> int:
    """Which layers attend to all, as a period; `layer_types` must follow it."""
    types = values.get("layer_types")
    period = int(values.get("sliding_window_pattern") or (2 if architecture == "gemma2" else 6))
    if types and "full_attention" in types:
        period = types.index("full_attention") + 1
    if types:
        expected = [_layer_type(layer, period) for layer in range(len(types))]
        if list(types) != expected:
            _refuse("layer_types", types, f"one full_attention at the end of every {period} layers")
    return period


def _layer_type(layer: int, period: int) -> str:
    return "sliding_attention" if period and (layer + 1) % period else "full_attention"


def hf_config(config: ModelConfig, *, context_tokens: int) -> dict[str, Any]:
    """The `config.json` of `config`.

    Args:
        context_tokens: what to state as the longest context.

    Raises:
        DataError: the architecture named in `config` cannot express its switches.
    """
    gemma = config.architecture in ("gemma2", "gemma3")
    activation = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}[config.activation]
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.architecture]],
        "model_type": {ours: theirs for theirs, ours in _MODEL_TYPES.items()}.get(
            config.architecture, config.architecture
        ),
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.mlp_width,
        "hidden_activation" if gemma else "hidden_act": activation,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied_embeddings,
        "max_position_embeddings": context_tokens,
        "rope_theta": config.rope_theta,
        "torch_dtype": "float32",
    }
    if config.rope_scaling != "none":
        values["rope_scaling"] = {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    if config.rope_scaling == "llama3":
        values["rope_scaling"] |= {
            "low_freq_factor": config.rope_low_frequency_factor,
            "high_freq_factor": config.rope_high_frequency_factor,
            "original_max_position_embeddings": config.rope_original_tokens,
        }
    if config.architecture == "qwen3_moe":
        values |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "moe_intermediate_size": config.mlp_width,
            "norm_topk_prob": config.normalize_expert_weights,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if gemma:
        values |= {
            "query_pre_attn_scalar": config.query_scale_width or config.head_width,
            "attn_logit_softcapping": config.attention_softcap or None,
            "final_logit_softcapping": config.logit_softcap or None,
            "sliding_window": config.sliding_window,
            "layer_types": [_layer_type(layer, config.sliding_period) for layer in range(config.num_layers)],
        }
    if config.architecture == "gemma3":
        values["rope_local_base_freq"] = config.local_rope_theta
    _check_expressed(config, values)
    return values


def computed_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields that say what is computed, adapters and tactics left out; equal for equal models."""
    tactics = {
        "pretrained_uri", "lora_rank", "lora_alpha", "lora_targets", "compute_dtype", "attention", "remat",
        "logprob_chunk_tokens",
    }  # fmt: skip
    fields = {name: value for name, value in vars(config).items() if name not in tactics}
    fields["query_scale_width"] = config.query_scale_width or config.head_width
    if config.rope_scaling != "llama3":
        for name in ("rope_low_frequency_factor", "rope_high_frequency_factor", "rope_original_tokens"):
            del fields[name]
    return fields


def differences(config: ModelConfig, other: ModelConfig) -> list[str]:
    """`field: value, not value of other` for each that makes them other models."""
    mine, theirs = computed_fields(config), computed_fields(other)
    names = sorted({*mine, *theirs})
    return [f"{n}: {mine.get(n)!r}, not {theirs.get(n)!r}" for n in names if mine.get(n) != theirs.get(n)]


def _check_expressed(config: ModelConfig, values: Mapping[str, Any]) -> None:
    lost = differences(config, model_config(values))
    if lost:
        raise DataError(
            f"model.architecture: received {config.architecture}, which cannot express {'; '.join(lost)}. "
            "Name the architecture that has these switches."
        )


# ---- tensors -----------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where one of our tensors lies."""

    pattern: str
    """Their name, with `{layer}` and `{expert}` where ours is stacked."""
    transposed: bool


def places(config: ModelConfig) -> dict[str, Place]:
    """Our name -> their place, for every tensor of the model without adapters."""
    layer = "model.layers.{layer}."
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if config.post_norms:
        norms |= {
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    table = {
        "embedding": Place("model.embed_tokens.weight", False),
        "final_norm.scale": Place("model.norm.weight", False),
    }
    if not config.tied_embeddings:
        table["head"] = Place(LM_HEAD, True)
    for ours, theirs in norms.items():
        table[f"blocks.{ours}.scale"] = Place(f"{layer}{theirs}.weight", False)
    for ours, theirs in {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}.items():
        table[f"blocks.attention.{ours}.weight"] = Place(f"{layer}self_attn.{theirs}.weight", True)
        if config.attention_bias and ours != "output":
            table[f"blocks.attention.{ours}.bias"] = Place(f"{layer}self_attn.{theirs}.bias", False)
    if config.query_key_norm:
        for ours, theirs in {"query_norm": "q_norm", "key_norm": "k_norm"}.items():
            table[f"blocks.attention.{ours}.scale"] = Place(f"{layer}self_attn.{theirs}.weight", False)
    for name in ("gate", "up", "down"):
        if config.num_experts:
            table[f"blocks.mlp.{name}"] = Place(f"{layer}mlp.experts.{{expert}}.{name}_proj.weight", True)
        else:
            table[f"blocks.mlp.{name}.weight"] = Place(f"{layer}mlp.{name}_proj.weight", True)
    if config.num_experts:
        table["blocks.mlp.router"] = Place(f"{layer}mlp.gate.weight", True)
    return table


def their_names(config: ModelConfig, place: Place) -> Iterator[tuple[tuple[int, ...], str]]:
    """Index into our stacked tensor, and their name there."""
    layers = range(config.num_layers) if "{layer}" in place.pattern else [None]
    experts = range(config.num_experts) if "{expert}" in place.pattern else [None]
    for layer, expert in itertools.product(layers, experts):
        index = tuple(i for i in (layer, expert) if i is not None)
        yield index, place.pattern.format(layer=layer, expert=expert)


def from_hf(config: ModelConfig, names: Iterable[str], read: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
    """Our tensors, float32.

    Args:
        names: of all their tensors.
        read: one of them, in any floating type.

    Raises:
        DataError: a tensor is missing, surplus or of another shape, or not finite.
    """
    config = config.base()
    expected = {name: leaf.shape for name, leaf in named_leaves(abstract_parameters(config)).items()}
    table = places(config)
    assert table.keys() == expected.keys()
    names = set(names)
    wanted = {their for place in table.values() for _, their in their_names(config, place)}
    surplus = names - wanted
    if LM_HEAD in surplus and config.tied_embeddings:
        surplus.discard(LM_HEAD)
        if not np.array_equal(read(LM_HEAD), read(table["embedding"].pattern)):
            raise DataError(f"{LM_HEAD}: differs from the embedding, although config.json ties them")
    if wanted - names or surplus:
        raise DataError(
            f"weights: missing {_some(wanted - names)}, surplus {_some(surplus)}; accepted exactly the tensors of "
            f"{ARCHITECTURES[config.architecture]}. Import the folder of a text-only causal language model."
        )
    tensors = {}
    for ours, place in table.items():
        tensor = np.empty(expected[ours], np.float32)
        for index, theirs in their_names(config, place):
            part = np.asarray(read(theirs)).astype(np.float32)
            part = part.T if place.transposed else part
            if part.shape != tensor[index].shape:
                raise DataError(f"{theirs}: received {list(part.shape)}, accepted {list(tensor[index].shape)}")
            if not np.isfinite(part).all():
                raise DataError(f"{theirs}: holds a number that is not finite")
            tensor[index] = part
        tensors[ours] = tensor
    return tensors


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "") if listed else "none"


def to_hf(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Their names and tensors, one after another; adapters must be merged before (`merged`)."""
    for ours, place in places(config).items():
        for index, theirs in their_names(config, place):
            part = tensors[ours][index] if index else tensors[ours]
            yield theirs, np.ascontiguousarray(part.T if place.transposed else part)


def merged(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our tensors with `W + (alpha / rank) A B` in the place of weight and adapter."""
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith((".lora_a", ".lora_b"))}
    for name, low in tensors.items():
        if name.endswith(".lora_a"):
            stem = name.removesuffix("lora_a")
            added = np.matmul(low.astype(np.float64), tensors[stem + "lora_b"].astype(np.float64))
            weight = found[stem + "weight"]
            found[stem + "weight"] = (weight + config.lora_scale * added).astype(weight.dtype)
    return found

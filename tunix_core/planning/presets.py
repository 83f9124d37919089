"""The run that a plan is about: a model by name, by its `config.json` or by a recipe, and everything else as options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunix_core.config import RunConfig
from tunix_core.config_loading import config_from_dict, load_recipe, overridden, recipe_names
from tunix_core.errors import ConfigError, DataError
from tunix_core.mesh_config import AXES
from tunix_core.models.huggingface import model_config

_LLAMA = {"model_type": "llama", "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
_QWEN2 = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}
_GEMMA2 = {
    "model_type": "gemma2",
    "vocab_size": 256000,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def _sized(family: dict[str, Any], width: int, layers: int, heads: int, kv_heads: int, mlp: int, **other: Any) -> Any:
    return {
        **family,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        **other,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "llama3-8b": _sized(_LLAMA, 4096, 32, 32, 8, 14336),
    "llama3-70b": _sized(_LLAMA, 8192, 80, 64, 8, 28672),
    "qwen2.5-7b": _sized(_QWEN2, 3584, 28, 28, 4, 18944, vocab_size=152064),
    "qwen2.5-32b": _sized(_QWEN2, 5120, 64, 40, 8, 27648, vocab_size=152064),
    "qwen3-0.6b": _sized(_QWEN3, 1024, 28, 16, 8, 3072, tie_word_embeddings=True),
    "qwen3-8b": _sized(_QWEN3, 4096, 36, 32, 8, 12288),
    "qwen3-32b": _sized(_QWEN3, 5120, 64, 64, 8, 25600),
    "gemma2-9b": _sized(_GEMMA2, 3584, 42, 16, 8, 14336, query_pre_attn_scalar=256),
    "gemma2-27b": _sized(_GEMMA2, 4608, 46, 32, 16, 36864, head_dim=128, query_pre_attn_scalar=144),
}
"""What the models' own `config.json` say, as far as it is not the default there."""


def _architecture(model: str) -> Any:
    """The `config.json` of a preset or a folder; None: neither."""
    if model in PRESETS:
        return PRESETS[model]
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if file.suffix != ".json" or not file.is_file():
        return None
    try:
        return json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise DataError(f"{file}: {error}. Take the file that was saved with the weights.") from error


def planned_config(model: str, overrides: Mapping[str, Any]) -> RunConfig:
    """The resolved configuration. A model without a recipe is a full-weight run in bfloat16 with `remat = layer`.

    Args:
        model: a preset, a folder with a `config.json` or that file, or a recipe.
        overrides: as `load_recipe` takes them.

    Raises:
        ConfigError: no such model, or an option that is none.
        DataError: a `config.json` that the decoder does not compute.
    """
    if model in recipe_names() or model.endswith(".toml"):
        return load_recipe(model, overrides)
    architecture = _architecture(model)
    if architecture is None:
        raise ConfigError(
            "--model",
            model,
            f"one of {', '.join(PRESETS)}; a folder with a config.json; a recipe: {', '.join(recipe_names())} or a .toml file",
            "Name one of them.",
        )
    shape = model_config(architecture)
    values = {
        "recipe": "plan",
        "model": {
            **{
                name: value
                for name, value in vars(shape).items()
                if value != type(shape).__dataclass_fields__[name].default
            },
            "compute_dtype": "bfloat16",
            "remat": "layer",
            "pretrained_uri": f"plan:{model}",
        },
        "learner": {"windows_per_microbatch": 1},
    }
    return config_from_dict(overridden(values, overrides))


def parse_mesh(text: str) -> dict[str, int]:
    """`fsdp=4,tensor=8` -> every axis with its number of devices.

    Raises:
        ConfigError: an axis that is none, twice, or without a count.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, count = part.partition("=")
        if axis not in AXES or axis in sizes or not count.isdecimal() or int(count) < 1:
            raise ConfigError(
                "--mesh", text, f"AXIS=COUNT,… of {', '.join(AXES)}, each at most once", "Like fsdp=4,stage=4,tensor=8."
            )
        sizes[axis] = int(count)
    return {axis: sizes.get(axis, 1) for axis in AXES}

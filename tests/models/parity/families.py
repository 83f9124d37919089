"""Small models of each family, as Hugging Face configurations, and weights that a name decides.

Used by both sides of the comparison, so standard library and NumPy only.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

_SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "sliding_window": 7}

PROMPT = "<|im_start|>user\nWhat is 1234 + 56?  It's a café's\tbill, isn't it?<|im_end|>\n<|im_start|>assistant\n"
"""What the tokenizers are compared on."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama3": {"model_type": "llama", "rope_theta": 500_000.0, "rope_scaling": _LLAMA3},
    "llama3_tied": {"model_type": "llama", "rope_theta": 10_000.0, "tie_word_embeddings": True},
    "qwen2_5": {"model_type": "qwen2", "rope_theta": 1_000_000.0, "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "rope_theta": 1_000_000.0, "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "gemma2": {
        **_GEMMA,
        "model_type": "gemma2",
        "query_pre_attn_scalar": 10,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        **_GEMMA,
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": 8,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
}


def config(family: str) -> dict[str, Any]:
    """The family's `config.json`."""
    return {**_SHAPE, **FAMILIES[family]}


def tokens(family: str) -> np.ndarray:
    """int64 [2, 40]."""
    return np.random.default_rng(zlib.crc32(family.encode())).integers(0, _SHAPE["vocab_size"], (2, 40))


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32, large enough that softcaps, norms and routers matter."""
    values = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    if len(shape) == 1:
        return (1 + 0.3 * values).astype(np.float32)
    return (values / np.sqrt(shape[-1])).astype(np.float32)


def weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """One per name."""
    return {name: weight(name, shape) for name, shape in shapes.items()}

"""A GGUF file (llama.cpp's format) as the files of a Hugging Face folder.

Quantised weights are widened to float32: what is imported is the model that llama.cpp serves. Only the
Llama family with a byte-level BPE tokenizer is known; others are refused by name. GGUF interleaves
the rotary pairs of query and key; they are put back into Hugging Face's halves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tunix_core.errors import DataError
from tunix_core.models import huggingface
from tunix_core.storage import multifile
from tunix_core.storage.multifile import CONFIG
from tunix_core.validation import require_package

_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": huggingface.LM_HEAD,
}
_DIGIT_BY_DIGIT = ("smollm",)
"""Pre-tokenizers that split numbers into digits before the byte-level step."""

_CONTROL_TOKEN = 3


def converted(path: Path) -> Iterator[tuple[str, bytes]]:
    """The model's files, verified.

    Raises:
        ConfigError: the package `gguf` or `tokenizers` is not installed.
        DataError: no GGUF file, another architecture or tokenizer, missing or surplus tensors.
    """
    require_package("gguf", "models")
    require_package("tokenizers", "models")
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, OSError) as error:
        raise DataError(f"{path.name}: no GGUF file ({error})") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise DataError(f"{path.name}: general.architecture: received {architecture!r}, accepted 'llama'")
    try:
        values = _config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
        tokenizer, settings = _tokenizer(path, fields)
    except KeyError as error:
        raise DataError(f"{path.name}: {error.args[0]}: missing") from None
    tensors = {_their_name(tensor.name): _widened(gguf, tensor, values) for tensor in reader.tensors}
    huggingface.from_hf(huggingface.model_config(values), tensors, tensors.__getitem__)
    yield CONFIG, json.dumps(values, indent=1).encode()
    yield multifile.WEIGHTS, multifile.encode_tensors(tensors)
    yield "tokenizer.json", tokenizer.encode()
    yield "tokenizer_config.json", json.dumps(settings, indent=1, ensure_ascii=False).encode()


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": [huggingface.ARCHITECTURES["llama"]],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "hidden_act": "silu",
        # Stored in float32: 1e-05 comes back as 9.999999747378752e-06.
        "rms_norm_eps": float(np.format_float_positional(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "max_position_embeddings": fields["llama.context_length"],
        "tie_word_embeddings": tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def _their_name(name: str) -> str:
    """Hugging Face's name of a tensor; one that is unknown keeps its own and is refused as surplus."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _PER_LAYER:
        return f"model.layers.{parts[1]}.{_PER_LAYER[parts[2]]}.{parts[3]}"
    return name


def _widened(gguf: Any, tensor: Any, values: dict[str, Any]) -> np.ndarray:
    weight = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
    heads = {"attn_q": values["num_attention_heads"], "attn_k": values["num_key_value_heads"]}
    kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
    if kind in heads:
        rows, columns = weight.shape
        weight = weight.reshape(heads[kind], -1, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return np.ascontiguousarray(weight)


def _tokenizer(path: Path, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """`tokenizer.json` and `tokenizer_config.json`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind[0] != "gpt2" or kind[1] not in _DIGIT_BY_DIGIT:
        raise DataError(
            f"{path.name}: tokenizer.ggml.model and .pre: received {kind}, accepted ('gpt2', {_DIGIT_BY_DIGIT[0]!r})"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    settings = {
        "chat_template": fields.get("tokenizer.chat_template"),
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
    }
    return tokenizer.to_str(), settings

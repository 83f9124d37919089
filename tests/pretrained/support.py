"""Small models as files: Hugging Face folders, GGUF files, a tokenizer with a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.parity import families
from tests.models.test_huggingface import model
from tunix_core.storage import multifile

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer_json() -> str:
    """Byte-level BPE without merges beyond bytes, with two marks."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ["<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return str(tokenizer.to_str())


def chat_files(template: str = TEMPLATE) -> dict[str, str]:
    return {"tokenizer.json": tokenizer_json(), "tokenizer_config.json": json.dumps({"chat_template": template})}


def hf_folder(folder: Path, family: str = "qwen2_5", *, dtype: Any = np.float32, num_shards: int = 1) -> Path:
    """A Hugging Face folder of a small model."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(families.config(family)))
    tensors = {name: tensor.astype(dtype) for name, tensor in model(family)[1].items()}
    if num_shards == 1:
        (folder / "model.safetensors").write_bytes(multifile.encode_tensors(tensors))
        return folder
    where = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {t: tensors[t] for t in sorted(tensors)[shard::num_shards]}
        (folder / name).write_bytes(multifile.encode_tensors(part))
        where |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def gguf_file(path: Path, *, architecture: str = "llama", drop: str = "") -> tuple[Path, dict[str, np.ndarray]]:
    """A Llama-family GGUF file, and the Hugging Face tensors that it holds."""
    import gguf

    heads, kv_heads, width, hidden, layers = 4, 2, 32, 48, 2
    alphabet = list(json.loads(tokenizer_json())["model"]["vocab"])
    tokens = [*alphabet, "<|im_start|>", "<|im_end|>"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_merges([])
    writer.add_token_types([1] * len(alphabet) + [3, 3])
    writer.add_bos_token_id(len(alphabet))
    writer.add_eos_token_id(len(alphabet) + 1)
    writer.add_chat_template(TEMPLATE)
    theirs: dict[str, np.ndarray] = {}

    def add(name: str, hf_name: str, *shape: int, interleaved_heads: int = 0) -> None:
        tensor = families.weight(hf_name, shape)
        theirs[hf_name] = tensor
        if interleaved_heads:  # llama.cpp's order of the rotary pairs
            rows, columns = shape
            tensor = tensor.reshape(interleaved_heads, 2, -1, columns).swapaxes(1, 2).reshape(rows, columns)
        if name != drop:
            writer.add_tensor(name, np.ascontiguousarray(tensor))

    add("token_embd.weight", "model.embed_tokens.weight", len(tokens), width)
    add("output_norm.weight", "model.norm.weight", width)
    for i in range(layers):
        ours, hf = f"blk.{i}.", f"model.layers.{i}."
        add(f"{ours}attn_norm.weight", f"{hf}input_layernorm.weight", width)
        add(f"{ours}ffn_norm.weight", f"{hf}post_attention_layernorm.weight", width)
        add(f"{ours}attn_q.weight", f"{hf}self_attn.q_proj.weight", heads * 8, width, interleaved_heads=heads)
        add(f"{ours}attn_k.weight", f"{hf}self_attn.k_proj.weight", kv_heads * 8, width, interleaved_heads=kv_heads)
        add(f"{ours}attn_v.weight", f"{hf}self_attn.v_proj.weight", kv_heads * 8, width)
        add(f"{ours}attn_output.weight", f"{hf}self_attn.o_proj.weight", width, heads * 8)
        add(f"{ours}ffn_gate.weight", f"{hf}mlp.gate_proj.weight", hidden, width)
        add(f"{ours}ffn_up.weight", f"{hf}mlp.up_proj.weight", hidden, width)
        add(f"{ours}ffn_down.weight", f"{hf}mlp.down_proj.weight", width, hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, theirs

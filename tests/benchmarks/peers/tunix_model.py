"""google-tunix's `Llama3` with our weights, for its trainer and its sampler."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig

PAD, EOS = 0, 1


class IdsAsText:
    """A tokenizer for those who want one: text is ids with spaces between them."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return PAD  # the sampler prepends a start unless it is 0

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


def make_model(model: dict[str, Any], tensors: dict[str, np.ndarray]) -> Llama3:
    config = ModelConfig(
        num_layers=model["num_layers"],
        vocab_size=model["vocab_size"],
        embed_dim=model["model_width"],
        hidden_dim=model["mlp_width"],
        num_heads=model["num_heads"],
        head_dim=model["head_width"],
        num_kv_heads=model["num_kv_heads"],
        rope_theta=int(model["rope_theta"]),
        norm_eps=model["norm_epsilon"],
        weight_tying=False,
    )
    made = Llama3(config, rngs=nnx.Rngs(0))
    wanted = {"embedder.input_embedding": tensors["embedding"], "lm_head.w": tensors["head"]}
    wanted["final_norm.w"] = tensors["final_norm.scale"]
    names = {
        "input_layernorm.w": "attention_norm.scale",
        "post_attention_layernorm.w": "mlp_norm.scale",
        "attn.q_proj.w": "attention.query.weight",
        "attn.k_proj.w": "attention.key.weight",
        "attn.v_proj.w": "attention.value.weight",
        "attn.o_proj.w": "attention.output.weight",
        "mlp.gate_proj.kernel": "mlp.gate.weight",
        "mlp.up_proj.kernel": "mlp.up.weight",
        "mlp.down_proj.kernel": "mlp.down.weight",
    }
    for i in range(config.num_layers):
        wanted |= {f"layers.{i}.{theirs}": tensors[f"blocks.{ours}"][i] for theirs, ours in names.items()}
    state = nnx.state(made, nnx.Param)
    flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    if flat.keys() != wanted.keys():
        raise RuntimeError(f"Llama3 has other parameters than expected: {sorted(flat.keys() ^ wanted.keys())}")
    for name, leaf in flat.items():
        leaf.set_value(jax.numpy.asarray(wanted[name].reshape(leaf.get_value().shape)))
    nnx.update(made, state)
    return made

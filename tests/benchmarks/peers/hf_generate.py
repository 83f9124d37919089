"""Hugging Face `generate` on the same requests: `python -m tests.benchmarks.peers.hf_generate FOLDER THREADS`.

`LlamaForCausalLM` in float32 with our weights, PyTorch's fused attention, its dynamic KV cache, prompts padded on the
left to the longest of the batch, no gradients. Nothing but temperature 1 shapes the draws.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from tests.benchmarks.peers.requests import Request, padded_left, read_work, rows_computed
from tests.benchmarks.peers.turns import serve

PAD = 0


def make_model(model: dict[str, Any], tensors: dict[str, np.ndarray]) -> LlamaForCausalLM:
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model["vocab_size"],
            hidden_size=model["model_width"],
            intermediate_size=model["mlp_width"],
            num_hidden_layers=model["num_layers"],
            num_attention_heads=model["num_heads"],
            num_key_value_heads=model["num_kv_heads"],
            head_dim=model["head_width"],
            rms_norm_eps=model["norm_epsilon"],
            rope_parameters={"rope_type": "default", "rope_theta": model["rope_theta"]},
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
    )
    state = {
        "model.embed_tokens.weight": tensors["embedding"],
        "model.norm.weight": tensors["final_norm.scale"],
        "lm_head.weight": tensors["head"].T,
    }
    names = {
        "input_layernorm": "attention_norm.scale",
        "post_attention_layernorm": "mlp_norm.scale",
        "self_attn.q_proj": "attention.query.weight",
        "self_attn.k_proj": "attention.key.weight",
        "self_attn.v_proj": "attention.value.weight",
        "self_attn.o_proj": "attention.output.weight",
        "mlp.gate_proj": "mlp.gate.weight",
        "mlp.up_proj": "mlp.up.weight",
        "mlp.down_proj": "mlp.down.weight",
    }
    for i in range(model["num_layers"]):
        for theirs, ours in names.items():
            state[f"model.layers.{i}.{theirs}.weight"] = tensors[f"blocks.{ours}"][i].T
    made.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in state.items()})
    return made.eval()


def main(folder: Path, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    work = read_work(folder)
    model = make_model(work.settings["model"], work.tensors)

    @torch.inference_mode()
    def answer(batch: list[Request], *, sampled: bool) -> list[list[int]]:
        ids, real = padded_left([request.prompt for request in batch], PAD)
        sampling: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        made = model.generate(
            torch.from_numpy(ids),
            attention_mask=torch.from_numpy(real.astype(np.int64)),
            max_new_tokens=max(request.num_new for request in batch),
            eos_token_id=None,
            pad_token_id=PAD,
            use_cache=True,
            **(sampling if sampled else {"do_sample": False}),
        )
        rows = made[:, ids.shape[1] :].tolist()
        return [row[: request.num_new] for row, request in zip(rows, batch, strict=True)]

    def update() -> dict[str, Any]:
        return {"tokens": [ids for batch in work.batches for ids in answer(batch, sampled=True)]}

    def warm_up() -> dict[str, Any]:
        answer(work.batches[0], sampled=True)
        return {"greedy": answer(work.greedy, sampled=False)}

    torch.manual_seed(0)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    layout = f"{len(work.batches)} static batches, padded to the longest"
    serve(update, {"versions": versions, "layout": layout, "rows": rows_computed(work)}, warm_up)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""The same update in plain PyTorch: `python -m tests.benchmarks.peers.torch_loop FOLDER THREADS`.

As a practitioner writes it: a Llama-style decoder with PyTorch's fused attention, trajectories sorted
by length and padded into micro-batches of a token budget (so causal attention needs no mask: padding
comes last), the head only where a token is predicted, the reference in `no_grad`, gradients
accumulated, AdamW behind a norm clip. The mathematics is that of the learner's objective; its
diagnostics are left out. Runs where torch is installed and our packages are not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.benchmarks.peers.padding import batch_padded_microbatches, sorted_microbatches
from tests.benchmarks.peers.turns import serve

TRL_ROWS = 8
"""TRL's default `per_device_train_batch_size`."""

MICROBATCH_TOKENS = 1024
"""Padded. Of 512 to 16384 the small ones are fastest, on one core and for both models: more of them is real."""

Tensors = dict[str, torch.Tensor]


def layer_by_layer(arrays: dict[str, np.ndarray], owner: str) -> Tensors:
    """Our stacked layers as tensors of their own, named by their number: the gradient of a slice would be a whole stack."""
    tensors: Tensors = {}
    for name, value in arrays.items():
        if name.startswith(f"{owner}blocks."):
            own = name.removeprefix(f"{owner}blocks.")
            tensors |= {f"{i}.{own}": torch.from_numpy(layer.copy()) for i, layer in enumerate(value)}
        elif name.startswith(owner):
            tensors[name.removeprefix(owner)] = torch.from_numpy(value)
    return tensors


def rms_norm(x: torch.Tensor, scale: torch.Tensor, epsilon: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), scale, epsilon)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """`x [B, heads, T, E]`"""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def hidden_states(params: Tensors, model: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """`tokens [B, T]`, each row a trajectory and padding behind it -> `[B, T, D]`."""
    rows, length = tokens.shape
    heads, kv_heads, width = model["num_heads"], model["num_kv_heads"], model["head_width"]
    frequencies = model["rope_theta"] ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    cosine, sine = angles.cos(), angles.sin()
    x = F.embedding(tokens, params["embedding"])

    def split(y: torch.Tensor, num: int) -> torch.Tensor:
        return y.view(rows, length, num, width).transpose(1, 2)

    for i in range(model["num_layers"]):
        layer = {k.removeprefix(f"{i}."): leaf for k, leaf in params.items() if k.startswith(f"{i}.")}
        y = rms_norm(x, layer["attention_norm.scale"], model["norm_epsilon"])
        query = rotate(split(y @ layer["attention.query.weight"], heads), cosine, sine)
        key = rotate(split(y @ layer["attention.key.weight"], kv_heads), cosine, sine)
        value = split(y @ layer["attention.value.weight"], kv_heads)
        if heads != kv_heads:
            key, value = (z.repeat_interleave(heads // kv_heads, dim=1) for z in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(rows, length, -1) @ layer["attention.output.weight"]
        y = rms_norm(x, layer["mlp_norm.scale"], model["norm_epsilon"])
        x = x + (F.silu(y @ layer["mlp.gate.weight"]) * (y @ layer["mlp.up.weight"])) @ layer["mlp.down.weight"]
    return rms_norm(x, params["final_norm.scale"], model["norm_epsilon"])


def logprobs(params: Tensors, model: dict[str, Any], batch: Tensors) -> torch.Tensor:
    """`[policy tokens]`"""
    before = hidden_states(params, model, batch["tokens"])[:, :-1][batch["mask"][:, 1:]]
    logits = (before @ params["head"]) / batch["temperature"][:, None]
    return -F.cross_entropy(logits, batch["tokens"][:, 1:][batch["mask"][:, 1:]], reduction="none")


def loss_sum(current: torch.Tensor, reference: torch.Tensor, batch: Tensors, algorithm: dict[str, Any]) -> torch.Tensor:
    """Decoupled PPO with truncated weights and the unbiased k3 leash, summed over policy tokens."""
    proximal = current.detach()
    weight = (proximal - batch["behavior"]).exp().clamp(max=algorithm["importance_truncation"])
    ratio = (current - proximal).exp()
    clipped = ratio.clamp(1 - algorithm["clip_low"], 1 + algorithm["clip_high"])
    policy = -torch.minimum(ratio * batch["advantages"], clipped * batch["advantages"])
    log_r = reference - current
    k3 = log_r.exp() - 1 - log_r
    return (weight * (policy + algorithm["kl_coefficient"] * ratio * k3)).sum()


def microbatches(arrays: dict[str, np.ndarray], layout: str) -> list[Tensors]:
    """`sorted`: rows of like length together, each micro-batch as wide as its longest. `trl`: as TRL lays them out."""
    lengths = arrays["trajectory.lengths"]
    if layout == "trl":
        batches = batch_padded_microbatches(len(lengths), TRL_ROWS)
        return [_padded(arrays, rows, int(lengths.max())) for rows in batches]
    batches = sorted_microbatches(lengths, MICROBATCH_TOKENS)
    return [_padded(arrays, rows, int(lengths[rows[0]])) for rows in batches]


def _padded(arrays: dict[str, np.ndarray], rows: list[int], width: int) -> Tensors:
    lengths = arrays["trajectory.lengths"]
    offsets = np.cumsum(lengths) - lengths
    shape = (len(rows), width)
    tokens, mask, behavior = np.zeros(shape, np.int64), np.zeros(shape, bool), np.zeros(shape, np.float32)
    for row, i in enumerate(rows):
        own = slice(offsets[i], offsets[i] + lengths[i])
        tokens[row, : lengths[i]] = arrays["trajectory.tokens"][own]
        mask[row, : lengths[i]] = arrays["trajectory.loss_mask"][own]
        behavior[row, : lengths[i]] = arrays["trajectory.behavior_logprobs"][own]
    mask[:, 0] = False
    counts = mask.sum(axis=1)
    return {
        "tokens": torch.from_numpy(tokens),
        "mask": torch.from_numpy(mask),
        "behavior": torch.from_numpy(behavior[mask]),
        "advantages": torch.from_numpy(np.repeat(arrays["trajectory.advantages"][rows], counts)),
        "temperature": torch.from_numpy(np.repeat(arrays["trajectory.temperature"][rows], counts)),
    }


def main(folder: Path, num_threads: int, layout: str) -> None:
    torch.set_num_threads(num_threads)
    settings = json.loads((folder / "work.json").read_text())
    model, algorithm, optimizer = (settings[name] for name in ("model", "algorithm", "optimizer"))
    arrays = dict(np.load(folder / "work.npz"))

    params, reference = (layer_by_layer(arrays, owner) for owner in ("policy.", "reference."))
    for leaf in params.values():
        leaf.requires_grad_()
    adamw = torch.optim.AdamW(
        params.values(),
        lr=optimizer["learning_rate"],
        betas=(optimizer["beta1"], optimizer["beta2"]),
        weight_decay=optimizer["weight_decay"],
    )

    def update() -> dict[str, Any]:
        batches = microbatches(arrays, layout)
        num_policy_tokens = sum(int(batch["mask"].sum()) for batch in batches)
        adamw.zero_grad(set_to_none=True)
        total = 0.0
        for batch in batches:
            with torch.no_grad():
                anchor = logprobs(reference, model, batch)
            loss = loss_sum(logprobs(params, model, batch), anchor, batch, algorithm) / num_policy_tokens
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(params.values(), optimizer["gradient_clip_norm"])
        adamw.step()
        return {"loss": total}

    batches = microbatches(arrays, layout)
    padded = sum(batch["tokens"].numel() for batch in batches)
    described = f"{len(batches)} micro-batches, " + (
        "sorted by length" if layout == "sorted" else "padded to the longest"
    )
    serve(update, {"versions": {"torch": torch.__version__}, "layout": described, "padded_tokens": padded})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])

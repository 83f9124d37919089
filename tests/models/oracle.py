"""The decoder written out in float64 NumPy: one trajectory, one head, one query at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from tunix_core.config import ModelConfig


def _norm(x: np.ndarray, scale: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2) + epsilon) * scale


def _rotate(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    half = len(x) // 2
    turned = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        turned[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        turned[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return turned


def hidden_states(tensors: Mapping[str, np.ndarray], config: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    """`tokens [T]` of one trajectory -> float64 `[T, D]`."""
    w = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    group = config.num_heads // config.num_kv_heads
    states = [w["embedding"][token] for token in tokens]
    for layer in range(config.num_layers):
        b = {name.removeprefix("blocks."): t[layer] for name, t in w.items() if name.startswith("blocks.")}
        queries, keys, values = [], [], []
        for position, x in enumerate(states):
            normed = _norm(x, b["attention_norm.scale"], config.norm_epsilon)
            query, key, value = (
                (normed @ b[f"attention.{name}.weight"]).reshape(-1, config.head_width)
                for name in ("query", "key", "value")
            )
            queries.append([_rotate(head, position, config.rope_theta) for head in query])
            keys.append([_rotate(head, position, config.rope_theta) for head in key])
            values.append(value)
        after = []
        for t, x in enumerate(states):
            mixed = []
            for head in range(config.num_heads):
                scores = [
                    queries[t][head] @ keys[s][head // group] / math.sqrt(config.head_width) for s in range(t + 1)
                ]
                weights = np.exp(np.array(scores) - max(scores))
                weights /= weights.sum()
                mixed.append(sum(weights[s] * values[s][head // group] for s in range(t + 1)))
            x = x + np.concatenate(mixed) @ b["attention.output.weight"]
            normed = _norm(x, b["mlp_norm.scale"], config.norm_epsilon)
            gate = normed @ b["mlp.gate.weight"]
            x = x + (gate / (1 + np.exp(-gate)) * (normed @ b["mlp.up.weight"])) @ b["mlp.down.weight"]
            after.append(x)
        states = after
    return np.stack([_norm(x, w["final_norm.scale"], config.norm_epsilon) for x in states])


def logprobs_and_entropy(
    tensors: Mapping[str, np.ndarray], hidden: np.ndarray, targets: np.ndarray, temperature: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`hidden [T, D]`, `targets [T]`, `temperature [T]` -> float64 `[T]`, `[T]`."""
    logprobs, entropies = [], []
    for state, target, heat in zip(np.asarray(hidden, np.float64), targets, temperature, strict=True):
        logits = state @ np.asarray(tensors["head"], np.float64) / heat
        all_logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        logprobs.append(all_logprobs[target])
        entropies.append(-(np.exp(all_logprobs) * all_logprobs).sum())
    return np.array(logprobs), np.array(entropies)

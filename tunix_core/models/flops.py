"""Floating point operations that a decoder's training needs, from its shape: the numerator of utilisation.

The convention is that of PaLM (arXiv:2204.02311, appendix B): operations that the mathematics needs, whatever the
program executes. A matrix product `[m, k] x [k, n]` is 2mnk; the backward pass is twice the forward pass; what is
computed again to save memory (here the vocabulary projection in the backward pass) does not count, and neither
do norms, rotations, softmax, padding or the half of the scores that the causal mask hides. Two departures from
that appendix: attention is counted over the real segments and half of their squares, not over full windows, and
the embedding is a look-up that costs nothing. The forward pass of the KL reference trains nothing: it is a
figure of its own beside the model's operations.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tunix_core.model_config import ModelConfig

BACKWARD = 2
"""Backward passes cost so many forward passes: a product's two gradients are a product each. A frozen weight
has one: under adapters the base's products go back once."""


def causal_pairs(lengths: np.ndarray, visible_tokens: int = 0) -> int:
    """(query, key) pairs that causal attention within segments needs.

    Args:
        lengths: int [N], of the segments.
        visible_tokens: how far a query sees, its own token included; 0: its whole segment.
    """
    lengths = np.asarray(lengths, np.int64)
    seen = np.minimum(lengths, visible_tokens) if visible_tokens else lengths
    return int((seen * (seen + 1) // 2 + (lengths - seen) * seen).sum())


class _Products(NamedTuple):
    """Multiply-adds of one token's pass through the products with weights."""

    base: int
    adapters: int


def layer_shapes(config: ModelConfig, num_experts: int = 1) -> dict[str, tuple[int, int]]:
    """Rows and columns of a layer's products with weights, those of so many experts side by side."""
    width, hidden = config.model_width, config.mlp_width * num_experts
    heads, kv_heads = config.num_heads * config.head_width, config.num_kv_heads * config.head_width
    return {
        "query": (width, heads),
        "key": (width, kv_heads),
        "value": (width, kv_heads),
        "output": (heads, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }


def layer_elements(config: ModelConfig, num_experts: int = 1) -> int:
    """Of those weights together."""
    return sum(rows * columns for rows, columns in layer_shapes(config, num_experts).values())


def adapter_elements(config: ModelConfig) -> int:
    """Of a layer's adapters."""
    shapes = layer_shapes(config)
    return sum(config.lora_rank * sum(shapes[name]) for name in config.lora_targets)


def _products(config: ModelConfig) -> _Products:
    width = config.model_width
    layer = layer_elements(config, config.experts_per_token or 1)
    layer += width * config.num_experts  # the router
    return _Products(
        config.num_layers * layer + width * config.vocab_size, config.num_layers * adapter_elements(config)
    )


def attention_flops(config: ModelConfig, lengths: np.ndarray) -> int:
    """Of one forward pass: scores, and the mixture of values."""
    num_local = sum(config.is_local(layer) for layer in range(config.num_layers))
    pairs = (config.num_layers - num_local) * causal_pairs(lengths)
    pairs += num_local * causal_pairs(lengths, config.sliding_window)
    return 2 * 2 * config.num_heads * config.head_width * pairs


def product_flops(config: ModelConfig, num_tokens: int) -> int:
    """Of one forward pass: all products with weights, those of adapters included."""
    return 2 * num_tokens * sum(_products(config))


def update_flops(config: ModelConfig, lengths: np.ndarray) -> int:
    """Model FLOPs of one update on trajectories of `lengths` [N]: forward and backward, nothing twice."""
    products, num_tokens = _products(config), int(np.sum(lengths))
    of_base = (1 if config.lora_rank else BACKWARD) + 1
    weights = 2 * num_tokens * (of_base * products.base + (1 + BACKWARD) * products.adapters)
    return weights + (1 + BACKWARD) * attention_flops(config, lengths)


def reference_flops(config: ModelConfig, lengths: np.ndarray) -> int:
    """Of the pass that gives the reference's log probabilities: forward only, no model FLOPs, no adapters."""
    return product_flops(config.base(), int(np.sum(lengths))) + attention_flops(config, lengths)

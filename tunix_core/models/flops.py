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

import numpy as np

from tunix_core.config import ModelConfig

BACKWARD = 2
"""Backward passes cost so many forward passes: a product's two gradients are a product each."""


def causal_pairs(lengths: np.ndarray) -> int:
    """(query, key) pairs that causal attention within segments of `lengths` [N] needs: n (n + 1) / 2 each."""
    lengths = np.asarray(lengths, np.int64)
    return int((lengths * (lengths + 1) // 2).sum())


def forward_flops(config: ModelConfig, num_tokens: int, num_pairs: int) -> int:
    """Of one pass over tokens of which `num_pairs` (query, key) pairs attend."""
    heads, kv_heads = config.num_heads * config.head_width, config.num_kv_heads * config.head_width
    projections = config.model_width * (heads + 2 * kv_heads) + heads * config.model_width
    mlp = 3 * config.model_width * config.mlp_width
    head = config.model_width * config.vocab_size
    per_token = 2 * (config.num_layers * (projections + mlp) + head)
    per_pair = 2 * 2 * heads * config.num_layers  # scores, and the mixture of values
    return num_tokens * per_token + num_pairs * per_pair


def update_flops(config: ModelConfig, lengths: np.ndarray) -> int:
    """Model FLOPs of one update on trajectories of `lengths` [N]: forward and backward, nothing twice."""
    return (1 + BACKWARD) * reference_flops(config, lengths)


def reference_flops(config: ModelConfig, lengths: np.ndarray) -> int:
    """Of the pass that gives the reference's log probabilities: forward only, no model FLOPs."""
    return forward_flops(config, int(np.sum(lengths)), causal_pairs(lengths))

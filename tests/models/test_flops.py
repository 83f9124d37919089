"""Analytic operations against a loop, and against what XLA counts in the compiled decoder."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_core.config import ModelConfig
from tunix_core.models import flops
from tunix_core.models.decoder import UNROLLED_LAYERS, abstract_parameters, hidden_states

MODEL = ModelConfig(
    vocab_size=512,
    model_width=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_width=32,
    mlp_width=384,
    attention="blocks",
)
WINDOWS, TOKENS, BLOCK = 2, 256, 128
XLA_TOLERANCE = 0.02
"""What norms, rotations, softmax and residuals add to the products of this small model."""


def test_pairs_equal_a_loop() -> None:
    lengths = [1, 5, 12]
    assert flops.causal_pairs(np.array(lengths)) == sum(
        1 for n in lengths for t in range(n) for s in range(n) if s <= t
    )
    assert flops.causal_pairs(np.zeros(0)) == 0


def test_golden_value_of_the_smallest_decoder() -> None:
    """D=2, H=K=1, E=2, F=3, V=5, L=1, one segment of two tokens: 3 pairs."""
    tiny = ModelConfig(
        vocab_size=5, model_width=2, num_layers=1, num_heads=1, num_kv_heads=1, head_width=2, mlp_width=3
    )
    per_token = 2 * (4 * 2 * 2 + 3 * 2 * 3 + 2 * 5)
    assert flops.reference_flops(tiny, np.array([2])) == 2 * per_token + 3 * 4 * 2
    assert flops.update_flops(tiny, np.array([2])) == 3 * flops.reference_flops(tiny, np.array([2]))


def test_segments_cost_less_than_one_of_their_whole_length() -> None:
    assert flops.update_flops(MODEL, np.array([64, 64])) < flops.update_flops(MODEL, np.array([128]))


def test_pairs_of_a_sliding_window_equal_a_loop() -> None:
    lengths = [1, 5, 12]
    assert flops.causal_pairs(np.array(lengths), 4) == sum(
        1 for n in lengths for t in range(n) for s in range(n) if 0 <= t - s < 4
    )


def test_frozen_weights_go_back_once() -> None:
    lengths = np.array([64])
    adapted = dataclasses.replace(MODEL, lora_rank=4, lora_targets=("query",))
    extra = MODEL.num_layers * 4 * (128 + 128) * 2 * 64
    attention = flops.attention_flops(MODEL, lengths)
    base = flops.product_flops(MODEL, 64)
    assert flops.update_flops(adapted, lengths) == 2 * base + 3 * extra + 3 * attention
    assert flops.reference_flops(adapted, lengths) == flops.reference_flops(MODEL, lengths) == base + attention


def test_a_token_pays_for_its_experts_only() -> None:
    experts = dataclasses.replace(MODEL, num_experts=8, experts_per_token=2)
    mlp = 3 * 128 * 384
    added = MODEL.num_layers * (mlp + 128 * 8) * 2
    assert flops.product_flops(experts, 1) == flops.product_flops(MODEL, 1) + added


def _count(function, *shapes) -> float:
    return jax.jit(function).lower(*shapes).compile().cost_analysis()["flops"]


def _logits(params, tokens):
    positions = jnp.broadcast_to(jnp.arange(TOKENS), tokens.shape)
    return hidden_states(params, MODEL, tokens, positions, jnp.ones_like(tokens)) @ params["head"]


def test_a_forward_and_a_backward_pass_as_xla_counts_them() -> None:
    """The compiled attention takes each block of queries against all keys up to the block's end."""
    assert MODEL.num_layers <= UNROLLED_LAYERS, "the body of a rolled loop would be counted once"
    shapes = (abstract_parameters(MODEL), jax.ShapeDtypeStruct((WINDOWS, TOKENS), jnp.int32))
    executed_pairs = WINDOWS * sum(BLOCK * stop for stop in range(BLOCK, TOKENS + 1, BLOCK))
    heads = MODEL.num_heads * MODEL.head_width
    products = flops.product_flops(MODEL, WINDOWS * TOKENS) + 4 * heads * MODEL.num_layers * executed_pairs
    assert products > flops.reference_flops(MODEL, np.full(WINDOWS, TOKENS)), "blocks on the diagonal are whole"
    forward = _count(_logits, *shapes)
    assert products == pytest.approx(forward, rel=XLA_TOLERANCE)
    assert products <= forward
    both = _count(jax.value_and_grad(lambda params, tokens: _logits(params, tokens).sum()), *shapes)
    assert (1 + flops.BACKWARD) * products == pytest.approx(both, rel=XLA_TOLERANCE)

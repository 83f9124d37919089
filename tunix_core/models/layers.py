"""The decoder's building blocks: pure attention maths, and the Flax NNX modules that own parameters.

Shapes: B rows, T query tokens, S key tokens, D model width, H query heads, K kv heads,
G = H / K query heads per kv head, E head width, F MLP width. Everything is float32.

Keys are kept as `[B, K, E, S]` and values as `[B, K, S, E]`, in the cache and in the packed
path alike: each (row, kv head) is then one plain matrix for both products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix_core.config import ModelConfig

MASKED_SCORE = -1e30
"""Finite, so that a query that may see nothing (padding) still gets finite numbers."""

INITIAL_SCALE = 0.02

Mix = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""(query [B,T,H,E], key [B,T,K,E], value [B,T,K,E]) -> (mixed [B,T,H,E], memory): how tokens see each other."""


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x [..., I] @ weight [I, O]` as one flat product.

    With two token axes XLA's CPU backend transposes before the weight gradient: 1.6 times the time of an MLP.
    """
    return (x.reshape(-1, x.shape[-1]) @ weight).reshape(*x.shape[:-1], weight.shape[-1])


def rotation(positions: jax.Array, head_width: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of rotary positions (Su et al., arXiv:2104.09864), each `[B, T, 1, E/2]`.

    Computed once per forward pass and shared by all layers.
    """
    frequencies = theta ** (-jnp.arange(0, head_width, 2, dtype=jnp.float32) / head_width)  # [E/2]
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn `x [B, T, heads, E]`; pair i is (i, i + E/2), the half-rotation convention of Llama and Qwen."""
    cosine, sine = angles
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def attend(query: jax.Array, keys: jax.Array, values: jax.Array, allowed: jax.Array) -> jax.Array:
    """Grouped-query attention.

    Args:
        query: `[B, T, H, E]`, unscaled.
        keys: `[B, K, E, S]`.
        values: `[B, K, S, E]`.
        allowed: bool `[B, T, S]`; query t sees key s where true. A query that sees nothing
            returns an arbitrary finite mixture.

    Returns:
        `[B, T, H, E]`.
    """
    num_rows, num_queries, num_heads, width = query.shape
    num_kv = keys.shape[1]
    group = num_heads // num_kv
    grouped = query.reshape(num_rows, num_queries, num_kv, group, width) / math.sqrt(width)
    # One matrix per (row, kv head): the queries of its whole group, [B, K, G T, E].
    grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(num_rows, num_kv, group * num_queries, width)
    scores = jnp.einsum("bkqe,bkes->bkqs", grouped, keys)
    scores = scores.reshape(num_rows, num_kv, group, num_queries, -1)
    scores = jnp.where(allowed[:, None, None], scores, MASKED_SCORE)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    weights = weights.reshape(num_rows, num_kv, group * num_queries, -1)
    # Dividing after the product touches E numbers per query instead of S.
    mixed = jnp.einsum("bkqs,bkse->bkqe", weights, values) / weights.sum(axis=-1, keepdims=True)
    mixed = mixed.reshape(num_rows, num_kv, group, num_queries, width)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(query.shape)


def packed_mix(segment_ids: jax.Array, block_tokens: int = 128) -> Mix:
    """Causal attention inside each segment of a packed window.

    Queries run in static blocks, each against the keys up to its own end, so the half above the
    diagonal costs nothing.

    Args:
        segment_ids: int `[B, T]`; segments are contiguous; 0 is padding, which sees only padding.
    """
    num_tokens = segment_ids.shape[1]
    order = jnp.arange(num_tokens)
    bounds = [(start, min(start + block_tokens, num_tokens)) for start in range(0, num_tokens, block_tokens)]
    masks = [
        (segment_ids[:, start:stop, None] == segment_ids[:, None, :stop])
        & (order[start:stop, None] >= order[None, :stop])
        for start, stop in bounds
    ]

    def mix(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, None]:
        keys = key.transpose(0, 2, 3, 1)
        values = value.transpose(0, 2, 1, 3)
        blocks = [
            attend(query[:, start:stop], keys[..., :stop], values[:, :, :stop], mask)
            for (start, stop), mask in zip(bounds, masks, strict=True)
        ]
        return jnp.concatenate(blocks, axis=1), None

    return mix


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation (Zhang & Sennrich, arXiv:1910.07467)."""

    def __init__(self, width: int, epsilon: float) -> None:
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.epsilon) * self.scale[...]


def _matrix(rngs: nnx.Rngs, rows: int, columns: int, scale: float = INITIAL_SCALE) -> nnx.Param:
    return nnx.Param(scale * jax.random.normal(rngs.params(), (rows, columns), jnp.float32))


def _residual_scale(config: ModelConfig) -> float:
    """Outputs onto the residual stream start smaller, so that its variance does not grow with depth."""
    return INITIAL_SCALE / math.sqrt(2 * config.num_layers)


class Attention(nnx.Module):
    """Projections of grouped-query attention; `mix` decides what the heads see (packed or cached)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        heads = config.num_heads * config.head_width
        kv_heads = config.num_kv_heads * config.head_width
        self.query = _matrix(rngs, config.model_width, heads)
        self.key = _matrix(rngs, config.model_width, kv_heads)
        self.value = _matrix(rngs, config.model_width, kv_heads)
        self.output = _matrix(rngs, heads, config.model_width, _residual_scale(config))
        self.head_width = config.head_width

    def __call__(self, x: jax.Array, angles: tuple[jax.Array, jax.Array], mix: Mix) -> tuple[jax.Array, Any]:
        query, key, value = (
            project(x, weight[...]).reshape(*x.shape[:2], -1, self.head_width)
            for weight in (self.query, self.key, self.value)
        )
        mixed, memory = mix(rotate(query, angles), rotate(key, angles), value)
        return project(mixed.reshape(*x.shape[:2], -1), self.output[...]), memory


class MLP(nnx.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.gate = _matrix(rngs, config.model_width, config.mlp_width)
        self.up = _matrix(rngs, config.model_width, config.mlp_width)
        self.down = _matrix(rngs, config.mlp_width, config.model_width, _residual_scale(config))

    def __call__(self, x: jax.Array) -> jax.Array:
        return project(jax.nn.silu(project(x, self.gate[...])) * project(x, self.up[...]), self.down[...])


class Block(nnx.Module):
    """One pre-norm layer."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.model_width, config.norm_epsilon)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.model_width, config.norm_epsilon)
        self.mlp = MLP(config, rngs)

    def __call__(self, x: jax.Array, angles: tuple[jax.Array, jax.Array], mix: Mix) -> tuple[jax.Array, Any]:
        mixed, memory = self.attention(self.attention_norm(x), angles, mix)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), memory


class Decoder(nnx.Module):
    """Embedding, L stacked blocks, final norm and an untied head."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.embedding = _matrix(rngs, config.vocab_size, config.model_width)
        self.blocks = nnx.vmap(lambda layer_rngs: Block(config, layer_rngs), in_axes=0, out_axes=0)(
            rngs.split(config.num_layers)
        )
        self.final_norm = RMSNorm(config.model_width, config.norm_epsilon)
        self.head = _matrix(rngs, config.model_width, config.vocab_size)

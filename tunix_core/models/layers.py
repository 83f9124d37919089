"""The decoder's building blocks: the Flax NNX modules that own parameters, for every family.

A family is a choice among `ModelConfig`'s switches; no module is declared twice. Weights are float32
and used in `compute_dtype`; norms, rotations and softmax are computed in float32.

Shapes: B rows, T tokens, D model width, H query heads, K kv heads, E head width, F MLP width, X experts.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tunix_core.distributed.parallel import ALONE, Parallel
from tunix_core.model_config import ModelConfig
from tunix_core.models.attention import Mix

INITIAL_SCALE = 0.02

Angles = tuple[jax.Array, jax.Array]
"""Cosines and sines, each float32 `[B, T, 1, E/2]`."""


class Setting(NamedTuple):
    """What one layer needs besides its weights."""

    angles: Angles
    mix: Mix
    parallel: Parallel = ALONE


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x [..., I] @ weight [I, O]` as one flat product, in the type of `x`.

    With two token axes XLA's CPU backend transposes before the weight gradient: 1.6 times the time of an MLP.
    """
    return (x.reshape(-1, x.shape[-1]) @ weight.astype(x.dtype)).reshape(*x.shape[:-1], weight.shape[-1])


def frequencies(config: ModelConfig, *, local: bool = False) -> np.ndarray:
    """Rotary frequencies `[E/2]` (Su et al., arXiv:2104.09864), with the model's scaling.

    `linear` divides all of them. `llama3` (Llama 3.1's release) divides those whose wavelength exceeds the
    original context over `rope_low_frequency_factor`, keeps those below it over `rope_high_frequency_factor`,
    and interpolates in between.
    """
    own = local and config.local_rope_theta > 0
    theta = config.local_rope_theta if own else config.rope_theta
    base = theta ** (-np.arange(0, config.head_width, 2, dtype=np.float64) / config.head_width)
    if own or config.rope_scaling == "none":
        return base.astype(np.float32)
    if config.rope_scaling == "linear":
        return (base / config.rope_factor).astype(np.float32)
    turns = config.rope_original_tokens * base / (2 * math.pi)  # over the original context
    low, high = config.rope_low_frequency_factor, config.rope_high_frequency_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (base * (kept + (1 - kept) / config.rope_factor)).astype(np.float32)


def rotation(positions: jax.Array, config: ModelConfig, *, local: bool = False) -> Angles:
    """Of int `positions [B, T]`. Computed once per forward pass and shared by all layers."""
    angles = positions[..., None, None].astype(jnp.float32) * frequencies(config, local=local)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, angles: Angles) -> jax.Array:
    """Turn `x [B, T, heads, E]`; pair i is (i, i + E/2), the half-rotation convention of Hugging Face."""
    cosine, sine = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation (Zhang & Sennrich, arXiv:1910.07467), computed in float32."""

    def __init__(self, width: int, config: ModelConfig) -> None:
        self.offset = 1.0 if config.unit_offset_norms else 0.0
        self.scale = nnx.Param(jnp.full((width,), 1.0 - self.offset, jnp.float32))
        self.epsilon = config.norm_epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        scale = self.scale[...] + self.offset if self.offset else self.scale[...]
        return (normed * scale).astype(x.dtype)


def _normal(rngs: nnx.Rngs, *shape: int, scale: float = INITIAL_SCALE) -> nnx.Param:
    return nnx.Param(scale * jax.random.normal(rngs.params(), shape, jnp.float32))


def _residual_scale(config: ModelConfig) -> float:
    """Outputs onto the residual stream start smaller, so that its variance does not grow with depth."""
    return INITIAL_SCALE / math.sqrt(2 * config.num_layers)


class Projection(nnx.Module):
    """`x W + b`, and with an adapter `+ (alpha / rank) (x A) B` (LoRA, arXiv:2106.09685), never merged.

    A starts normal and B zero, so that the adapted model starts as its base.
    """

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        name: str,
        rows: int,
        columns: int,
        *,
        scale: float = INITIAL_SCALE,
        bias: bool = False,
    ) -> None:
        self.weight = _normal(rngs, rows, columns, scale=scale)
        if bias:
            self.bias = nnx.Param(jnp.zeros((columns,), jnp.float32))
        self.has_bias = bias
        self.adapter_scale = config.lora_scale if name in config.lora_targets else 0.0
        if self.adapter_scale:
            self.lora_a = _normal(rngs, rows, config.lora_rank, scale=1 / math.sqrt(rows))
            self.lora_b = nnx.Param(jnp.zeros((config.lora_rank, columns), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = project(x, self.weight[...])
        if self.has_bias:
            y += self.bias[...].astype(x.dtype)
        if self.adapter_scale:
            y += project(project(x, self.lora_a[...]), self.lora_b[...]) * self.adapter_scale
        return y


class Attention(nnx.Module):
    """Projections of grouped-query attention; the layer's `mix` decides what the heads see."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        heads = config.num_heads * config.head_width
        kv_heads = config.num_kv_heads * config.head_width
        width, bias = config.model_width, config.attention_bias
        self.query = Projection(config, rngs, "query", width, heads, bias=bias)
        self.key = Projection(config, rngs, "key", width, kv_heads, bias=bias)
        self.value = Projection(config, rngs, "value", width, kv_heads, bias=bias)
        self.output = Projection(config, rngs, "output", heads, width, scale=_residual_scale(config))
        self.head_norms = config.query_key_norm
        if self.head_norms:
            self.query_norm = RMSNorm(config.head_width, config)
            self.key_norm = RMSNorm(config.head_width, config)
        self.head_width = config.head_width

    def __call__(self, x: jax.Array, setting: Setting) -> tuple[jax.Array, Any]:
        query, key, value = (
            layer(x).reshape(*x.shape[:2], -1, self.head_width) for layer in (self.query, self.key, self.value)
        )
        if self.head_norms:
            query, key = self.query_norm(query), self.key_norm(key)
        mixed, memory = setting.mix(rotate(query, setting.angles), rotate(key, setting.angles), value)
        return self.output(mixed.reshape(*x.shape[:2], -1)), memory


def activate(config: ModelConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    """SwiGLU or GeGLU (Shazeer, arXiv:2002.05202), the latter with the tanh approximation."""
    gated = jax.nn.silu(gate) if config.activation == "silu" else jax.nn.gelu(gate, approximate=True)
    return gated * up


class MLP(nnx.Module):
    """The gated MLP."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        width, hidden = config.model_width, config.mlp_width
        self.gate = Projection(config, rngs, "gate", width, hidden)
        self.up = Projection(config, rngs, "up", width, hidden)
        self.down = Projection(config, rngs, "down", hidden, width, scale=_residual_scale(config))
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(activate(self.config, self.gate(x), self.up(x)))


class Experts(nnx.Module):
    """A mixture of experts (Qwen3-MoE): softmax over all, the best few per token, no token dropped.

    Tokens are sorted by expert and each expert's run is one slice of a ragged product.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        shape = config.num_experts, config.model_width, config.mlp_width
        self.router = _normal(rngs, config.model_width, config.num_experts)
        self.gate = _normal(rngs, *shape)
        self.up = _normal(rngs, *shape)
        self.down = _normal(rngs, shape[0], shape[2], shape[1], scale=_residual_scale(config))
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        flat = x.reshape(-1, x.shape[-1])  # [N, D]
        probabilities = jax.nn.softmax(project(flat.astype(jnp.float32), self.router[...]), axis=-1)
        weights, chosen = jax.lax.top_k(probabilities, config.experts_per_token)  # [N, k]
        if config.normalize_expert_weights:
            weights /= weights.sum(axis=-1, keepdims=True)
        order = jnp.argsort(chosen.reshape(-1))  # stable: equal inputs give equal sums
        source = order // config.experts_per_token
        sizes = (chosen.reshape(-1)[:, None] == jnp.arange(config.num_experts)).sum(axis=0, dtype=jnp.int32)

        def product(rows: jax.Array, weight: nnx.Param) -> jax.Array:
            return jax.lax.ragged_dot(rows, weight[...].astype(rows.dtype), sizes)

        rows = flat[source]
        out = product(activate(config, product(rows, self.gate), product(rows, self.up)), self.down)
        out *= weights.reshape(-1)[order][:, None].astype(out.dtype)
        return jnp.zeros_like(flat).at[source].add(out).reshape(x.shape)


class Block(nnx.Module):
    """One pre-norm layer.

    On a tensor axis `x` and what is added to it are the device's tokens; attention and MLP see all tokens, hold the
    device's heads and columns, and give parts of sums.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        width = config.model_width
        self.attention_norm = RMSNorm(width, config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(width, config)
        self.mlp = Experts(config, rngs) if config.num_experts else MLP(config, rngs)
        self.post_norms = config.post_norms
        if self.post_norms:
            self.attention_post_norm = RMSNorm(width, config)
            self.mlp_post_norm = RMSNorm(width, config)

    def __call__(self, x: jax.Array, setting: Setting) -> tuple[jax.Array, Any]:
        enter, leave = setting.parallel.enter, setting.parallel.leave
        mixed, memory = self.attention(enter(self.attention_norm(x)), setting)
        mixed = leave(mixed)
        if self.post_norms:
            mixed = self.attention_post_norm(mixed)
        x = x + mixed
        hidden = leave(self.mlp(enter(self.mlp_norm(x))))
        if self.post_norms:
            hidden = self.mlp_post_norm(hidden)
        return x + hidden, memory


class Decoder(nnx.Module):
    """Embedding, L stacked blocks, final norm and, unless it is tied, a head."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.embedding = _normal(rngs, config.vocab_size, config.model_width)
        self.blocks = nnx.vmap(lambda layer_rngs: Block(config, layer_rngs), in_axes=0, out_axes=0)(
            rngs.split(config.num_layers)
        )
        self.final_norm = RMSNorm(config.model_width, config)
        if not config.tied_embeddings:
            self.head = _normal(rngs, config.model_width, config.vocab_size)

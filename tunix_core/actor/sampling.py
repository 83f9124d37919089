"""Drawing tokens: inverse CDF with one uniform per slot, so a sample does not depend on its batch.

The uniform of a token comes from the request's key and the token's position in the trajectory and
from nothing else: not from the slot, the batch, the number of dispatches or a swap before it.
"""

from __future__ import annotations

import hashlib

import jax
import jax.numpy as jnp
import numpy as np

_BLOCK = 128
"""Entries per block of the two-level sum; a power of two near the root of large vocabularies."""


def request_key(*parts: object) -> np.ndarray:
    """Key of one request: uint32 [2], a digest of the parts (run seed, group, member, attempt)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return np.frombuffer(digest, np.uint32).copy()


def uniforms(keys: jax.Array, positions: jax.Array) -> jax.Array:
    """One number in [0, 1) per row.

    Args:
        keys: uint32 [N, 2], a request key per row.
        positions: int32 [N], of the token that is drawn.

    Returns:
        float32 [N].
    """

    def one(key: jax.Array, position: jax.Array) -> jax.Array:
        folded = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
        return jax.random.uniform(folded, (), jnp.float32)

    return jax.vmap(one)(keys, positions)


def inverse_cdf(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The index where the running sum of `weights` passes `uniform` times their total.

    Sums run over blocks first and inside one block then, which reads a large vocabulary twice
    instead of scanning it. Rounding never selects an entry of weight zero.

    Args:
        weights: float32 [N, V], not negative, some positive.
        uniform: float32 [N] in [0, 1).

    Returns:
        int32 [N].
    """
    num_rows, width = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -width % _BLOCK))).reshape(num_rows, -1, _BLOCK)  # [N, K, 128]
    sums = blocks.sum(-1)  # [N, K]
    running = jnp.cumsum(sums, -1)
    target = uniform * running[:, -1]
    block = _first_above(running, target, sums)
    before = jnp.take_along_axis(running - sums, block[:, None], 1)[:, 0]
    chosen = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]  # [N, 128]
    inside = _first_above(jnp.cumsum(chosen, -1), target - before, chosen)
    return block * _BLOCK + inside


def _first_above(running: jax.Array, target: jax.Array, weights: jax.Array) -> jax.Array:
    """First index whose running sum exceeds `target`, held to those of positive weight. int32 [N]."""
    width = running.shape[1]
    index = jnp.sum(running <= target[:, None], -1, dtype=jnp.int32)
    first = jnp.argmax(weights > 0, -1).astype(jnp.int32)
    last = (width - 1 - jnp.argmax(weights[:, ::-1] > 0, -1)).astype(jnp.int32)
    return jnp.clip(index, first, last)


def sample(
    logits: jax.Array, keys: jax.Array, positions: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draw a token per row, with the log-probability of the distribution really drawn from.

    Args:
        logits: float32 [N, V].
        keys: uint32 [N, 2].
        positions: int32 [N], of the tokens drawn.
        temperature: float32 [N], above 0.

    Returns:
        tokens int32 [N], log-probabilities float32 [N] at the row's temperature.
    """
    scaled = logits.astype(jnp.float32) / temperature[:, None]
    peak = scaled.max(-1, keepdims=True)
    weights = jnp.exp(scaled - peak)
    tokens = inverse_cdf(weights, uniforms(keys, positions))
    return tokens, _logprob(scaled, peak, weights, tokens)


def greedy(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The likeliest token per row, with its log-probability at temperature 1.

    Args:
        logits: float32 [N, V].

    Returns:
        tokens int32 [N], log-probabilities float32 [N].
    """
    logits = logits.astype(jnp.float32)
    peak = logits.max(-1, keepdims=True)
    tokens = jnp.argmax(logits, -1).astype(jnp.int32)
    return tokens, _logprob(logits, peak, jnp.exp(logits - peak), tokens)


def _logprob(logits: jax.Array, peak: jax.Array, weights: jax.Array, tokens: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(logits, tokens[:, None], 1)[:, 0]
    return chosen - peak[:, 0] - jnp.log(weights.sum(-1))

"""Drawing tokens: inverse CDF with one uniform per slot, so a sample does not depend on its batch.

The uniform of a token comes from the request's key and the token's position in the trajectory and
from nothing else: not from the slot, the batch, the number of dispatches or a swap before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Kind = Literal["temperature", "greedy", "any"]
"""What an engine is compiled for: training's temperature alone, the likeliest token, or any mix of `Request`s."""


class Limits(NamedTuple):
    """Per row, what `Request` says below its temperature."""

    greedy: jax.Array | np.ndarray  # bool [N]
    top_k: jax.Array | np.ndarray  # int32 [N]
    top_p: jax.Array | np.ndarray  # float32 [N]
    min_p: jax.Array | np.ndarray  # float32 [N]


class Draws(NamedTuple):
    """Per row, how its tokens are drawn."""

    keys: jax.Array | np.ndarray  # uint32 [N, 2]
    temperatures: jax.Array | np.ndarray  # float32 [N]
    limits: Limits | None
    """Of kind `any` only."""


_BLOCK = 128
"""Entries per block of the two-level sum; a power of two near the root of large vocabularies."""


def request_key(*parts: object) -> np.ndarray:
    """Key of one request: uint32 [2], a digest of the parts (run seed, group, member, attempt)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return np.frombuffer(digest, np.uint32).copy()


def uniforms(keys: jax.Array | np.ndarray, positions: jax.Array) -> jax.Array:
    """One number in [0, 1) per row.

    Args:
        keys: uint32 [N, 2], a request key per row.
        positions: int32 [N], of the token that is drawn.

    Returns:
        float32 [N].
    """

    def one(key: jax.Array | np.ndarray, position: jax.Array) -> jax.Array:
        folded = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32"), position)
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
    logits: jax.Array, keys: jax.Array | np.ndarray, positions: jax.Array, temperature: jax.Array | np.ndarray
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


def truncated(logits: jax.Array, positions: jax.Array, draws: Draws) -> tuple[jax.Array, jax.Array]:
    """Draw a token per row from what top-k, then top-p, and min-p leave of it, or the likeliest.

    Args:
        logits: float32 [N, V].
        positions: int32 [N], of the tokens drawn.
        draws: with limits.

    Returns:
        tokens int32 [N]; log-probabilities float32 [N] of the renormalised distribution, of greedy rows as `greedy`.
    """
    assert draws.limits is not None
    greedily = draws.limits.greedy
    scaled = logits.astype(jnp.float32) / jnp.where(greedily, 1, draws.temperatures)[:, None]
    peak = scaled.max(-1, keepdims=True)
    weights = jnp.exp(scaled - peak)
    kept = jnp.where(weights >= thresholds(weights, draws.limits)[:, None], weights, 0)
    drawn = inverse_cdf(kept, uniforms(draws.keys, positions))
    tokens = jnp.where(greedily, jnp.argmax(scaled, -1).astype(jnp.int32), drawn)
    return tokens, _logprob(scaled, peak, kept, tokens)


def thresholds(weights: jax.Array, limits: Limits) -> jax.Array:
    """The smallest weight per row that its limits keep.

    Found by bisection over the bits of a float, which are in the order of the numbers: nothing is
    sorted, and equal weights are treated alike.

    Args:
        weights: float32 [N, V] in [0, 1], the largest of a row 1.
        limits: of the rows.

    Returns:
        float32 [N].
    """

    def largest(active: jax.Array | np.ndarray, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """float32 [N]: the largest threshold for which `enough` of `kept [N, V]` holds; 0 of idle rows."""

        def narrower(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = bounds
            middle = low + (high - low) // 2
            kept = weights >= jax.lax.bitcast_convert_type(middle, jnp.float32)[:, None]
            met = enough(kept)
            return jnp.where(met, middle, low), jnp.where(met, high, middle)

        above = jnp.int32(np.float32(1).view(np.int32) + 1)
        start = jnp.zeros(weights.shape[0], jnp.int32), jnp.where(active, above, 1)
        low, _ = jax.lax.while_loop(lambda bounds: jnp.any(bounds[1] - bounds[0] > 1), narrower, start)
        return jax.lax.bitcast_convert_type(low, jnp.float32)

    by_rank = largest(limits.top_k > 0, lambda kept: kept.sum(-1) >= limits.top_k)
    ranked = jnp.where(weights >= by_rank[:, None], weights, 0)
    mass = limits.top_p * ranked.sum(-1)
    by_mass = largest(limits.top_p < 1, lambda kept: jnp.where(kept, ranked, 0).sum(-1) >= mass)
    return jnp.maximum(jnp.maximum(by_rank, by_mass), limits.min_p)


def draw(kind: Kind, logits: jax.Array, positions: jax.Array, draws: Draws) -> tuple[jax.Array, jax.Array]:
    """Tokens int32 [N] and their log-probabilities float32 [N], as an engine of `kind` takes them."""
    match kind:
        case "temperature":
            return sample(logits, draws.keys, positions, draws.temperatures)
        case "greedy":
            return greedy(logits)
        case "any":
            return truncated(logits, positions, draws)


def _logprob(logits: jax.Array, peak: jax.Array, weights: jax.Array, tokens: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(logits, tokens[:, None], 1)[:, 0]
    return chosen - peak[:, 0] - jnp.log(weights.sum(-1))

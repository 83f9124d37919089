"""Grouped-query attention: over a cache, and over packed windows by one of several backends.

| backend | how | pays for |
|---|---|---|
| dense | one `[T, T]` mask | everything; the oracle of the others |
| blocks | static query blocks against the keys up to their end | the causal half |
| segments | loops over key blocks between the segment's start and the diagonal | blocks that a segment touches |
| pallas | the same as TPU kernels, see `pallas_attention` | blocks that a segment touches |

`auto` is `segments` or, in short windows, `blocks`; a step on a TPU mesh takes `pallas` in its place.
All give the same numbers at real tokens; padding gets arbitrary finite ones. `segments` holds no array
of T x T, forward or backward: the flash recurrence (Dao et al., arXiv:2205.14135) with loop bounds
from the data. On CPU it wins from windows of 256 tokens on.

Shapes: B rows, T query tokens, S key tokens, H query heads, K kv heads, G = H / K query heads per kv
head, E head width, C tokens of a block. Keys are kept as `[B, K, E, S]` and values as `[B, K, S, E]`, in
the cache and in the packed path alike: each (row, kv head) is then one plain matrix for both products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from tunix_core.distributed.parallel import as_varying
from tunix_core.models import pallas_attention
from tunix_core.models.scores import MASKED_SCORE, Scores

SEGMENTS_FROM_TOKENS = 256
"""Windows from this size on take the segment-skipping backend by default."""

Mix = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""(query [B,T,H,E], key [B,T,K,E], value [B,T,K,E]) -> (mixed [B,T,H,E], memory): how tokens see each other."""

Backend = Literal["auto", "dense", "blocks", "segments", "pallas"]


def grouped(x: jax.Array, num_kv: int) -> jax.Array:
    """`[B, T, H, E]` -> `[B, K, G T, E]`: one matrix per (row, kv head), the queries of its whole group."""
    rows, tokens, heads, width = x.shape
    group = heads // num_kv
    return x.reshape(rows, tokens, num_kv, group, width).transpose(0, 2, 3, 1, 4).reshape(rows, num_kv, -1, width)


def ungrouped(x: jax.Array, num_tokens: int) -> jax.Array:
    """The inverse of `grouped`."""
    rows, num_kv, _, width = x.shape
    x = x.reshape(rows, num_kv, -1, num_tokens, width).transpose(0, 3, 1, 2, 4)
    return x.reshape(rows, num_tokens, -1, width)


def attend(query: jax.Array, keys: jax.Array, values: jax.Array, allowed: jax.Array, scores: Scores) -> jax.Array:
    """Attention under an explicit mask.

    Args:
        query: `[B, T, H, E]`, unscaled.
        keys: `[B, K, E, S]`.
        values: `[B, K, S, E]`.
        allowed: bool `[B, T, S]`; query t sees key s where true. A query that sees nothing
            returns an arbitrary finite mixture.

    Returns:
        `[B, T, H, E]` in the type of `values`.
    """
    num_kv, num_tokens = keys.shape[1], query.shape[1]
    s = scores(grouped(query, num_kv), keys)  # [B, K, G T, S]
    grid = (*s.shape[:2], -1, num_tokens, s.shape[-1])
    s = jnp.where(allowed[:, None, None], s.reshape(grid), MASKED_SCORE)
    weights = jnp.exp(s - jax.lax.stop_gradient(s.max(axis=-1, keepdims=True)))
    weights = weights.reshape(*s.shape[:2], -1, s.shape[-1])
    # Dividing after the product touches E numbers per query instead of S.
    mixed = jnp.matmul(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return ungrouped(mixed / weights.sum(axis=-1, keepdims=True), num_tokens).astype(values.dtype)


def packed_mix(
    segment_ids: jax.Array,
    scores: Scores,
    *,
    backend: Backend = "auto",
    visible_tokens: jax.Array | None = None,
) -> Mix:
    """Causal attention inside each segment of packed windows.

    Args:
        segment_ids: int `[B, T]`; segments are contiguous; 0 is padding, at the end of a window.
        backend: see the module.
        visible_tokens: int [], how many tokens back a query sees, its own included; None: its whole segment.
    """
    num_tokens = segment_ids.shape[1]
    if backend == "auto":
        backend = "segments" if num_tokens >= SEGMENTS_FROM_TOKENS else "blocks"
    if backend == "segments":
        return _segment_mix(segment_ids, scores, visible_tokens)
    if backend == "pallas":
        return _pallas_mix(segment_ids, scores, visible_tokens)
    return _block_mix(segment_ids, scores, visible_tokens, num_tokens if backend == "dense" else 128)


def _allowed(
    query_segments: jax.Array,
    key_segments: jax.Array,
    query_order: jax.Array,
    key_order: jax.Array,
    visible_tokens: jax.Array | None,
) -> jax.Array:
    """bool `[..., Q, S]` from ids `[..., Q]`, `[..., S]` and places in the window `[Q]`, `[S]`."""
    distance = query_order[:, None] - key_order[None, :]
    near = distance >= 0
    if visible_tokens is not None:
        near &= distance < visible_tokens
    return (query_segments[..., :, None] == key_segments[..., None, :]) & near


def _block_mix(segment_ids: jax.Array, scores: Scores, visible_tokens: jax.Array | None, block_tokens: int) -> Mix:
    num_tokens = segment_ids.shape[1]
    order = jnp.arange(num_tokens)
    bounds = [(start, min(start + block_tokens, num_tokens)) for start in range(0, num_tokens, block_tokens)]

    def mix(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, None]:
        keys, values = key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3)
        blocks = []
        for start, stop in bounds:
            allowed = _allowed(
                segment_ids[:, start:stop], segment_ids[:, :stop], order[start:stop], order[:stop], visible_tokens
            )
            blocks.append(attend(query[:, start:stop], keys[..., :stop], values[:, :, :stop], allowed, scores))
        return jnp.concatenate(blocks, axis=1), None

    return mix


# ---- segments ----------------------------------------------------------------------------------


def _pallas_mix(segment_ids: jax.Array, scores: Scores, visible_tokens: jax.Array | None) -> Mix:
    num_tokens = segment_ids.shape[1]
    block = min(512, -(-num_tokens // pallas_attention.LANES) * pallas_attention.LANES)
    layout, spare = _layout(segment_ids, visible_tokens, block)
    attend_packed = functools.partial(pallas_attention.attend_packed, layout=layout, scores=scores, block=block)

    def mix(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, None]:
        padded = (jnp.pad(x, [(0, 0), (0, spare), (0, 0), (0, 0)]) for x in (query, key, value))
        # Decided when the program is lowered, so also for a TPU that is only described.
        mixed = jax.lax.platform_dependent(
            *padded, tpu=attend_packed, default=functools.partial(attend_packed, interpret=True)
        )
        return mixed[:, :num_tokens], None

    return mix


def _layout(
    segment_ids: jax.Array, visible_tokens: jax.Array | None, block: int
) -> tuple[pallas_attention.Layout, int]:
    """Padded to whole blocks, and by how many tokens."""
    num_rows, num_tokens = segment_ids.shape
    spare = -num_tokens % block
    ids = jnp.pad(segment_ids, [(0, 0), (0, spare)])
    visible = jnp.int32(num_tokens + spare) if visible_tokens is None else visible_tokens.astype(jnp.int32)
    visible = as_varying(jnp.broadcast_to(visible, (num_rows,)), ids)
    first, last = jax.vmap(functools.partial(_block_bounds, block=block))(ids, visible)
    return pallas_attention.Layout(ids, first, last, visible), spare


class _Row(NamedTuple):
    """One window in blocks of C tokens, N of them."""

    query: jax.Array  # [N, K, G C, E]
    keys: jax.Array  # [N, K, E, C]
    values: jax.Array  # [N, K, C, E]
    segments: jax.Array  # int [N, C]
    first: jax.Array  # int [N]: the first key block that a query block sees
    last: jax.Array  # int [N]: the last query block that sees a key block
    visible_tokens: jax.Array  # int []


def _segment_mix(
    segment_ids: jax.Array, scores: Scores, visible_tokens: jax.Array | None, block_tokens: int = 64
) -> Mix:
    num_tokens = segment_ids.shape[1]
    block = min(block_tokens, num_tokens)
    layout, spare = _layout(segment_ids, visible_tokens, block)
    ids = layout.segment_ids
    blocked_ids = ids.reshape(ids.shape[0], -1, block)

    def mix(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, None]:
        rows, _, heads, width = query.shape
        num_kv = key.shape[2]

        def blocked(x: jax.Array) -> jax.Array:  # [B, N, C, heads, E]
            return jnp.pad(x, [(0, 0), (0, spare), (0, 0), (0, 0)]).reshape(rows, -1, block, x.shape[2], width)

        queries = blocked(query).reshape(rows, -1, block, num_kv, heads // num_kv, width)
        queries = queries.transpose(0, 1, 3, 4, 2, 5).reshape(rows, -1, num_kv, heads // num_kv * block, width)
        row = _Row(
            query=queries,
            keys=blocked(key).transpose(0, 1, 3, 4, 2),
            values=blocked(value).transpose(0, 1, 3, 2, 4),
            segments=blocked_ids,
            first=layout.first,
            last=layout.last,
            visible_tokens=layout.visible_tokens,
        )
        mixed = jax.lax.map(lambda one: _attend_row(scores, *one), row)  # [B, N, K, G C, E]
        mixed = mixed.reshape(rows, -1, num_kv, heads // num_kv, block, width).transpose(0, 1, 4, 2, 3, 5)
        return mixed.reshape(rows, -1, heads, width)[:, :num_tokens], None

    return mix


def _block_bounds(segment_ids: jax.Array, visible_tokens: jax.Array, *, block: int) -> tuple[jax.Array, jax.Array]:
    """For one window `[T]`: `first` and `last` of `_Row`. A block of padding sees itself only."""
    num_tokens = segment_ids.shape[0]
    order = jnp.arange(num_tokens)
    new = jnp.concatenate([jnp.ones(1, bool), segment_ids[1:] != segment_ids[:-1]])
    ends = jnp.concatenate([new[1:], jnp.ones(1, bool)])
    start = jax.lax.cummax(jnp.where(new, order, 0))
    stop = jax.lax.cummin(jnp.where(ends, order, num_tokens), reverse=True)
    number = jnp.arange(num_tokens // block)
    heads, tails = order[::block], order[block - 1 :: block]
    first = jnp.maximum(start[heads], heads - visible_tokens + 1) // block
    last = jnp.minimum(stop[tails], tails + visible_tokens - 1) // block
    first = jnp.where(segment_ids[heads] == 0, number, first)
    last = jnp.where(segment_ids[tails] == 0, number, last)
    return first.astype(jnp.int32), last.astype(jnp.int32)


def _block_scores(
    scores: Scores, query: jax.Array, row: _Row, i: jax.Array, j: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Scores of query block i `[K, G C, E]` and key block j, and which of them count: `[K, G, C, C]` each."""
    s = scores(query, row.keys[j])
    num_kv, rows, block = s.shape
    order = jnp.arange(block)
    allowed = _allowed(row.segments[i], row.segments[j], i * block + order, j * block + order, row.visible_tokens)
    return s.reshape(num_kv, rows // block, block, block), jnp.broadcast_to(allowed, (1, 1, block, block))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_row(
    scores: Scores,
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    segments: jax.Array,
    first: jax.Array,
    last: jax.Array,
    visible_tokens: jax.Array,
) -> jax.Array:
    """Fields of a `_Row` -> mixed values, as its queries lie."""
    return _attend_row_forward(scores, query, keys, values, segments, first, last, visible_tokens)[0]


def _attend_row_forward(scores: Scores, *fields: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
    row = _Row(*fields)
    num_blocks, num_kv, rows, width = row.query.shape

    def query_block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        query = row.query[i]

        def body(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            highest, total, mixed = carry
            s, allowed = _block_scores(scores, query, row, i, j)
            s = jnp.where(allowed, s, MASKED_SCORE).reshape(num_kv, rows, -1)
            higher = jnp.maximum(highest, s.max(axis=-1))
            weights = jnp.exp(s - higher[..., None])
            kept = jnp.exp(highest - higher)
            more = jnp.matmul(weights.astype(values_type), row.values[j], preferred_element_type=jnp.float32)
            return higher, total * kept + weights.sum(axis=-1), mixed * kept[..., None] + more

        values_type = row.values.dtype
        start = (
            jnp.full((num_kv, rows), MASKED_SCORE, jnp.float32),
            jnp.zeros((num_kv, rows), jnp.float32),
            jnp.zeros((num_kv, rows, width), jnp.float32),
        )
        start = jax.tree.map(lambda x: as_varying(x, query), start)
        highest, total, mixed = jax.lax.fori_loop(row.first[i], i + 1, body, start)
        return (mixed / total[..., None]).astype(values_type), highest + jnp.log(total)

    mixed, log_total = jax.lax.map(query_block, jnp.arange(num_blocks))
    return mixed, (row, mixed, log_total)


def _attend_row_backward(scores: Scores, saved: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    row, mixed, log_total = saved
    num_blocks, num_kv, rows, _ = row.query.shape
    # The softmax's own term: each query's cotangent along its output.
    along = (mixed.astype(jnp.float32) * cotangent.astype(jnp.float32)).sum(axis=-1)  # [N, K, G C]

    def key_block(query_bar: jax.Array, j: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            keys_bar, values_bar, query_bar = carry
            query, out_bar = row.query[i], cotangent[i]
            s, allowed = _block_scores(scores, query, row, i, j)
            s, allowed = (jnp.broadcast_to(x, s.shape).reshape(num_kv, rows, -1) for x in (s, allowed))
            weights = jnp.where(allowed, jnp.exp(s - log_total[i][..., None]), 0)
            weights_bar = jnp.matmul(out_bar, row.values[j].swapaxes(-1, -2), preferred_element_type=jnp.float32)
            s_bar = scores.raw_cotangent(weights * (weights_bar - along[i][..., None]), s)
            typed = s_bar.astype(query.dtype)
            values_bar += jnp.matmul(
                weights.astype(out_bar.dtype).swapaxes(-1, -2), out_bar, preferred_element_type=jnp.float32
            )
            keys_bar += jnp.matmul(query.swapaxes(-1, -2), typed, preferred_element_type=jnp.float32)
            more = jnp.matmul(typed, row.keys[j].swapaxes(-1, -2), preferred_element_type=jnp.float32)
            return keys_bar, values_bar, query_bar.at[i].add(more)

        zeros = (jnp.zeros(row.keys.shape[1:], jnp.float32), jnp.zeros(row.values.shape[1:], jnp.float32))
        zeros = jax.tree.map(lambda x: as_varying(x, row.query), zeros)
        keys_bar, values_bar, query_bar = jax.lax.fori_loop(j, row.last[j] + 1, body, (*zeros, query_bar))
        return query_bar, (keys_bar, values_bar)

    start = as_varying(jnp.zeros(row.query.shape, jnp.float32), row.query)
    query_bar, (keys_bar, values_bar) = jax.lax.scan(key_block, start, jnp.arange(num_blocks))
    return (
        query_bar.astype(row.query.dtype),
        keys_bar.astype(row.keys.dtype),
        values_bar.astype(row.values.dtype),
        None,
        None,
        None,
        None,
    )


_attend_row.defvjp(_attend_row_forward, _attend_row_backward)

# ruff: noqa: ARG005  (an index map takes every grid index and scalar, whether it needs them or not)
"""Packed causal attention as Pallas kernels for TPU: the flash recurrence, and only blocks that a segment touches.

Loop bounds come from the data: the first key block of each query block (and the last query block of
each key block) is prefetched as a scalar, the grid counts from there, and what lies past the diagonal is
skipped without a transfer, since its block index stays the same. Three kernels: forward, gradient
of the query, gradient of key and value (Dao et al., arXiv:2205.14135; Dao, arXiv:2307.08691, algorithm 2).

Off TPU the kernels run in Pallas's interpreter: the numbers are checked there, the compiler accepts them
for a described TPU (`tests/learner/test_tpu_compile.py`), and no real TPU has run them yet.

Shapes: B rows, H query heads, K kv heads, S tokens in blocks of C, N of them, E head width.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tunix_core.distributed.parallel import as_varying
from tunix_core.models.scores import MASKED_SCORE, Scores

LANES, SUBLANES = 128, 8
"""Of a vector register; a value per token is repeated along the one axis or the other."""


class Layout(NamedTuple):
    """Where segments lie; see `attention`."""

    segment_ids: jax.Array  # int32 [B, S]
    first: jax.Array  # int32 [B, N]: the first key block that a query block sees
    last: jax.Array  # int32 [B, N]: the last query block that sees a key block
    visible_tokens: jax.Array  # int32 [B]


class _Static(NamedTuple):
    scores: Scores
    block: int
    interpret: bool


def _dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    return jax.lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=jnp.float32)


def _scores(static: _Static, q: Any, k: Any, q_ids: Any, k_ids: Any, i: Any, j: Any, visible: Any) -> Any:
    """Scores `[C, C]` of query block i and key block j, and which of them count."""
    s = _dot(q[0, 0], k[0, 0], (1, 1)) * static.scores.scale
    cap = static.scores.softcap
    s = cap * jnp.tanh(s / cap) if cap else s
    rows = i * static.block + jax.lax.broadcasted_iota(jnp.int32, s.shape, 0)
    columns = j * static.block + jax.lax.broadcasted_iota(jnp.int32, s.shape, 1)
    distance = rows - columns
    allowed = (q_ids[0][:, :1] == k_ids[0][:1, :]) & (distance >= 0) & (distance < visible)
    return s, allowed


def _forward_kernel(static, first, visible, q, k, v, q_ids, k_ids, out, log_total, highest, total, mixed):  # type: ignore[no-untyped-def]
    b, i, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    j = first[b, i] + step

    @pl.when(step == 0)
    def _() -> None:
        highest[...] = jnp.full_like(highest, MASKED_SCORE)
        total[...] = jnp.zeros_like(total)
        mixed[...] = jnp.zeros_like(mixed)

    @pl.when(j <= i)
    def _() -> None:
        s, allowed = _scores(static, q, k, q_ids, k_ids, i, j, visible[b])
        s = jnp.where(allowed, s, MASKED_SCORE)
        before = highest[...]
        after = jnp.maximum(before, s.max(axis=1, keepdims=True))
        weights, kept = jnp.exp(s - after[:, :1]), jnp.exp(before - after)
        highest[...] = after
        total[...] = total[...] * kept + weights.sum(axis=1, keepdims=True)
        mixed[...] = mixed[...] * kept[:, :1] + _dot(weights.astype(v.dtype), v[0, 0], (1, 0))

    @pl.when(step == pl.num_programs(3) - 1)
    def _() -> None:
        out[0, 0] = (mixed[...] / total[...][:, :1]).astype(out.dtype)
        log_total[0, 0] = (highest[...] + jnp.log(total[...])).T[:SUBLANES]


def _weights_and_scores_bar(static, q, k, v, q_ids, k_ids, out_bar, log_total, along, i, j, visible):  # type: ignore[no-untyped-def]
    """Attention weights and the cotangent of `q k^T`, `[C, C]` each."""
    s, allowed = _scores(static, q, k, q_ids, k_ids, i, j, visible)
    weights = jnp.where(allowed, jnp.exp(s - log_total[0, 0].T[:, :1]), 0)
    weights_bar = _dot(out_bar[0, 0], v[0, 0], (1, 1))
    bar = weights * (weights_bar - along[0, 0].T[:, :1])
    return weights, static.scores.raw_cotangent(bar, s)


def _query_kernel(static, first, visible, q, k, v, q_ids, k_ids, out_bar, log_total, along, q_bar, sum_):  # type: ignore[no-untyped-def]
    b, i, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    j = first[b, i] + step

    @pl.when(step == 0)
    def _() -> None:
        sum_[...] = jnp.zeros_like(sum_)

    @pl.when(j <= i)
    def _() -> None:
        _, bar = _weights_and_scores_bar(static, q, k, v, q_ids, k_ids, out_bar, log_total, along, i, j, visible[b])
        sum_[...] += _dot(bar.astype(k.dtype), k[0, 0], (1, 0))

    @pl.when(step == pl.num_programs(3) - 1)
    def _() -> None:
        q_bar[0, 0] = sum_[...].astype(q_bar.dtype)


def _key_value_kernel(static, last, visible, q, k, v, q_ids, k_ids, out_bar, log_total, along, k_bar, v_bar, ks, vs):  # type: ignore[no-untyped-def]
    b, j, head, step = pl.program_id(0), pl.program_id(2), pl.program_id(3), pl.program_id(4)
    i = j + step

    @pl.when((step == 0) & (head == 0))
    def _() -> None:
        ks[...] = jnp.zeros_like(ks)
        vs[...] = jnp.zeros_like(vs)

    @pl.when(i <= last[b, j])
    def _() -> None:
        weights, bar = _weights_and_scores_bar(
            static, q, k, v, q_ids, k_ids, out_bar, log_total, along, i, j, visible[b]
        )
        vs[...] += _dot(weights.astype(out_bar.dtype), out_bar[0, 0], (0, 0))
        ks[...] += _dot(bar.astype(q.dtype), q[0, 0], (0, 0))

    @pl.when((step == pl.num_programs(4) - 1) & (head == pl.num_programs(3) - 1))
    def _() -> None:
        k_bar[0, 0] = ks[...].astype(k_bar.dtype)
        v_bar[0, 0] = vs[...].astype(v_bar.dtype)


def _like(shape: tuple[int, ...], dtype: Any, q: jax.Array) -> jax.ShapeDtypeStruct:
    """An output that varies over the mesh as `q` does: `shard_map` checks it."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(q).manual_axis_type)


def _ids(layout: Layout) -> tuple[jax.Array, jax.Array]:
    """Segment ids along rows `[B, S, LANES]` and along columns `[B, SUBLANES, S]`."""
    ids = layout.segment_ids
    rows = jnp.broadcast_to(ids[:, :, None], (*ids.shape, LANES))
    return rows, jnp.broadcast_to(ids[:, None, :], (ids.shape[0], SUBLANES, ids.shape[1]))


def _call(
    static: _Static, kernel: Any, grid: Any, outputs: Any, num_parallel: int, num_arbitrary: int, *operands: Any
) -> Any:
    return pl.pallas_call(
        functools.partial(kernel, static),
        grid_spec=grid,
        out_shape=outputs,
        interpret=static.interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=[pltpu.PARALLEL] * num_parallel + [pltpu.ARBITRARY] * num_arbitrary
        ),
    )(*operands)


def _query_major(static: _Static, q: jax.Array, k: jax.Array, extra_inputs: int, outputs: Any, scratch: Any) -> Any:
    """Grid and blocks of kernels that keep a query block and walk its key blocks."""
    rows, heads, tokens, width = q.shape
    group, block = heads // k.shape[1], static.block
    num_blocks = tokens // block

    def key_block(b, i, step, first):  # type: ignore[no-untyped-def]
        return jnp.minimum(first[b, i] + step, i)  # past the diagonal: no new transfer

    key_spec = pl.BlockSpec(
        (1, 1, block, width), lambda b, h, i, s, first, _: (b, h // group, key_block(b, i, s, first), 0)
    )
    by_token = pl.BlockSpec((1, 1, SUBLANES, block), lambda b, h, i, s, first, _: (b, h, 0, i))
    whole = pl.BlockSpec((1, 1, block, width), lambda b, h, i, s, first, _: (b, h, i, 0))
    ids = [
        pl.BlockSpec((1, block, LANES), lambda b, h, i, s, first, _: (b, i, 0)),
        pl.BlockSpec((1, SUBLANES, block), lambda b, h, i, s, first, _: (b, 0, key_block(b, i, s, first))),
    ]
    inputs = [whole, key_spec, key_spec, *ids]
    if extra_inputs:
        inputs += [whole, by_token, by_token]
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(rows, heads, num_blocks, num_blocks),
        in_specs=inputs,
        out_specs=[whole, by_token][:outputs],
        scratch_shapes=scratch,
    )


def _forward(static: _Static, q: jax.Array, k: jax.Array, v: jax.Array, layout: Layout) -> Any:
    rows, heads, tokens, width = q.shape
    scratch = [pltpu.VMEM((static.block, n), jnp.float32) for n in (LANES, LANES, width)]
    outputs = [_like(q.shape, v.dtype, q), _like((rows, heads, SUBLANES, tokens), jnp.float32, q)]
    grid = _query_major(static, q, k, 0, 2, scratch)
    operands = (layout.first, layout.visible_tokens, q, k, v, *_ids(layout))
    return _call(static, _forward_kernel, grid, outputs, 3, 1, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, q: jax.Array, k: jax.Array, v: jax.Array, layout: Layout) -> jax.Array:
    out: jax.Array = _forward(static, q, k, v, layout)[0]
    return out


def _attend_forward(static: _Static, q: jax.Array, k: jax.Array, v: jax.Array, layout: Layout) -> Any:
    out, log_total = _forward(static, q, k, v, layout)
    return out, (q, k, v, layout, out, log_total)


def _attend_backward(static: _Static, saved: Any, out_bar: jax.Array) -> Any:
    q, k, v, layout, out, log_total = saved
    rows, heads, tokens, width = q.shape
    num_kv, block = k.shape[1], static.block
    group, num_blocks = heads // num_kv, tokens // block
    along = (out.astype(jnp.float32) * out_bar.astype(jnp.float32)).sum(axis=-1)
    along = jnp.broadcast_to(along[:, :, None, :], log_total.shape)
    shared = (q, k, v, *_ids(layout), out_bar, log_total, along)
    grid = _query_major(static, q, k, 3, 1, [pltpu.VMEM((block, width), jnp.float32)])
    (q_bar,) = _call(
        static,
        _query_kernel,
        grid,
        [_like(q.shape, q.dtype, q)],
        3,
        1,
        layout.first,
        layout.visible_tokens,
        *shared,
    )

    def query_block(b, j, step, last):  # type: ignore[no-untyped-def]
        return jnp.minimum(j + step, last[b, j])

    of_query = pl.BlockSpec(
        (1, 1, block, width),
        lambda b, h, j, g, s, last, _: (b, h * group + g, query_block(b, j, s, last), 0),
    )
    of_key = pl.BlockSpec((1, 1, block, width), lambda b, h, j, g, s, last, _: (b, h, j, 0))
    by_token = pl.BlockSpec(
        (1, 1, SUBLANES, block),
        lambda b, h, j, g, s, last, _: (b, h * group + g, 0, query_block(b, j, s, last)),
    )
    ids = [
        pl.BlockSpec((1, block, LANES), lambda b, h, j, g, s, last, _: (b, query_block(b, j, s, last), 0)),
        pl.BlockSpec((1, SUBLANES, block), lambda b, h, j, g, s, last, _: (b, 0, j)),
    ]
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(rows, num_kv, num_blocks, group, num_blocks),
        in_specs=[of_query, of_key, of_key, *ids, of_query, by_token, by_token],
        out_specs=[of_key, of_key],
        scratch_shapes=[pltpu.VMEM((block, width), jnp.float32) for _ in range(2)],
    )
    outputs = [_like(k.shape, k.dtype, q), _like(v.shape, v.dtype, q)]
    k_bar, v_bar = _call(static, _key_value_kernel, grid, outputs, 3, 2, layout.last, layout.visible_tokens, *shared)
    return q_bar, k_bar, v_bar, None


_attend.defvjp(_attend_forward, _attend_backward)


def attend_packed(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    layout: Layout,
    scores: Scores,
    *,
    block: int,
    interpret: bool = False,
) -> jax.Array:
    """Attention inside the segments of packed windows.

    Args:
        query: `[B, S, H, E]`, unscaled; S is a multiple of `block`.
        key, value: `[B, S, K, E]`.
        block: tokens of a block, C: a multiple of 128 on a TPU.
        interpret: run in Pallas's interpreter.

    Returns:
        `[B, S, H, E]` in the type of `value`; arbitrary and finite at padding.
    """
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
    k, v = as_varying(k, q), as_varying(v, q)
    layout = jax.tree.map(lambda leaf: as_varying(leaf, q), layout)
    return _attend(_Static(scores, block, interpret), q, k, v, layout).transpose(0, 2, 1, 3)

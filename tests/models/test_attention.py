"""Every attention backend against the dense one: forward, gradient, sliding windows, softcaps, types."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from tests.models.test_huggingface import model, params
from tunix_core.config import MeshConfig
from tunix_core.distributed.compilation import QUICK_ON_CPU
from tunix_core.distributed.mesh import make_mesh
from tunix_core.models import attention, decoder
from tunix_core.models.attention import Scores, packed_mix

BACKENDS = ["blocks", "segments", "pallas"]


def segments(lengths: list[int], num_tokens: int) -> np.ndarray:
    ids = np.zeros(num_tokens, np.int32)
    start = 0
    for number, length in enumerate(lengths, 1):
        ids[start : start + length] = number
        start += length
    return ids


def inputs(ids: np.ndarray, *, heads: int = 4, kv_heads: int = 2, width: int = 8, seed: int = 0) -> list[jax.Array]:
    """Query, key, value, and a cotangent that is zero at padding."""
    rng = np.random.default_rng(seed)
    shape = (*ids.shape, heads, width)
    arrays = [rng.normal(size=shape), *(rng.normal(size=(*ids.shape, kv_heads, width)) for _ in range(2))]
    arrays.append(rng.normal(size=shape) * (ids > 0)[..., None, None])
    return [jnp.asarray(a, jnp.float32) for a in arrays]


@functools.partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=QUICK_ON_CPU)
def run(backend, scores, window, ids, query, key, value, cotangent):  # type: ignore[no-untyped-def]
    visible = None if window is None else jnp.int32(window)

    def mixed(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return packed_mix(ids, scores, backend=backend, visible_tokens=visible)(query, key, value)[0]

    out, pull = jax.vjp(mixed, query, key, value)
    return out * (ids > 0)[..., None, None], pull(cotangent)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("window", "softcap"), [(None, 0.0), (5, 0.0), (None, 2.0), (150, 1.0)])
def test_equals_dense(backend: str, window: int | None, softcap: float) -> None:
    """Segments within, across and as long as blocks of 128; a window of padding; lengths that are no multiple."""
    rows = [[3, 125, 128, 1, 40], [290], [], [300]]
    ids = jnp.asarray(np.stack([segments(row, 300) for row in rows]))
    scores = Scores(8**-0.5, softcap)
    expected = run("dense", scores, window, ids, *inputs(ids))
    got = run(backend, scores, window, ids, *inputs(ids))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=8), st.sampled_from([None, 1, 130]))
def test_segments_equal_dense_for_any_layout(lengths: list[int], window: int | None) -> None:
    kept = [length for i, length in enumerate(lengths) if sum(lengths[: i + 1]) <= 300] or [300]
    ids = jnp.asarray(segments(kept, 300))[None]
    scores = Scores(8**-0.5)
    expected = run("dense", scores, window, ids, *inputs(ids, seed=len(kept)))
    got = run("segments", scores, window, ids, *inputs(ids, seed=len(kept)))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_no_array_is_as_large_as_the_square_of_the_window() -> None:
    ids = jnp.asarray(segments([2000, 96, 1900], 4096))[None]

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return packed_mix(ids, Scores(1.0), backend="segments")(query, key, value)[0].sum()

    compiled = (
        jax.jit(jax.grad(loss, argnums=(0, 1, 2)), compiler_options=QUICK_ON_CPU).lower(*inputs(ids)[:3]).compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 4096


def test_blocks_of_other_segments_are_not_visited() -> None:
    ids = jnp.asarray(segments([128, 128, 256, 100], 1024))
    first, last = attention._block_bounds(ids, jnp.int32(1024), block=128)
    assert first.tolist() == [0, 1, 2, 2, 4, 5, 6, 7]
    assert last.tolist() == [0, 1, 3, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("backend", ["dense", "blocks", "segments"])
def test_under_shard_map_with_checked_types(backend: str) -> None:
    """Loop carries must vary over the mesh as their inputs do. Pallas cannot interpret there: see `test_tpu_compile`."""
    ids = jnp.asarray(segments([100, 60], 200))[None]
    query, key, value, _ = inputs(ids)

    def local(ids: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        def loss(query: jax.Array) -> jax.Array:
            return packed_mix(ids, Scores(1.0), backend=backend)(query, key, value)[0].sum()  # type: ignore[arg-type]

        return jax.grad(loss)(query)

    mesh = make_mesh(MeshConfig())
    rows = PartitionSpec("data")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(rows,) * 4, out_specs=rows, check_vma=True)
    assert jax.jit(mapped, compiler_options=QUICK_ON_CPU)(ids, query, key, value).shape == query.shape


@pytest.mark.parametrize("family", ["llama3", "gemma3"])
@pytest.mark.parametrize("remat", ["layer", "matmuls"])
def test_remat_changes_memory_only(family: str, remat: str) -> None:
    config, _ = model(family)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (1, 24)), jnp.int32)
    positions = jnp.arange(24)[None]

    def gradient(config):  # type: ignore[no-untyped-def]
        def loss(weights: decoder.Params) -> jax.Array:
            states = decoder.hidden_states(weights, config, tokens, positions, jnp.ones_like(tokens))
            return decoder.token_logprobs(weights, config, states, tokens, 1.0)[0].sum()

        return jax.jit(jax.grad(loss), compiler_options=QUICK_ON_CPU)(params(family))

    expected, got = gradient(config), gradient(dataclasses.replace(config, remat=remat))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_mixed_precision_computes_in_bfloat16_from_float32_weights() -> None:
    config, _ = model("qwen3")
    half = dataclasses.replace(config, compute_dtype="bfloat16")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (1, 24)), jnp.int32)
    positions = jnp.arange(24)[None]

    def logprobs(config, weights):  # type: ignore[no-untyped-def]
        states = decoder.hidden_states(weights, config, tokens, positions, jnp.ones_like(tokens))
        return states, decoder.token_logprobs(weights, config, states, tokens, 1.0)[0]

    exact = jax.jit(functools.partial(logprobs, config), compiler_options=QUICK_ON_CPU)(params("qwen3"))[1]
    states, rough = jax.jit(functools.partial(logprobs, half), compiler_options=QUICK_ON_CPU)(params("qwen3"))
    assert states.dtype == jnp.bfloat16
    assert rough.dtype == jnp.float32
    difference = np.abs(rough - exact).max()
    assert 1e-4 < difference < 0.2
    gradient = jax.jit(jax.grad(lambda weights: logprobs(half, weights)[1].sum()), compiler_options=QUICK_ON_CPU)(
        params("qwen3")
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.float32)}
    assert decoder.init_cache(half, 2, 16).keys[0].dtype == jnp.bfloat16

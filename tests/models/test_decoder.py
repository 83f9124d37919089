"""The packed path against float64 NumPy, the cached path against the packed one."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import oracle
from tunix_core.config import ModelConfig
from tunix_core.models import decoder

TINY = ModelConfig(vocab_size=23, model_width=16, num_layers=2, num_heads=4, num_kv_heads=2, head_width=8, mlp_width=24)
DEEP = ModelConfig(vocab_size=11, model_width=8, num_layers=6, num_heads=2, num_kv_heads=1, head_width=4, mlp_width=8)

hidden_states = jax.jit(decoder.hidden_states, static_argnums=1)
token_logprobs = jax.jit(decoder.token_logprobs, static_argnums=1)
extend = jax.jit(decoder.extend, static_argnums=1, donate_argnums=2)
decode = jax.jit(decoder.decode, static_argnums=1, donate_argnums=2)


@functools.cache
def parameters(config: ModelConfig = TINY) -> decoder.Params:
    """Larger than at initialisation, so that attention is far from uniform; host arrays."""
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype(np.float32), decoder.abstract_parameters(config)
    )


def packed(lengths: list[list[int]], window_tokens: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random tokens, positions and segment ids `[B, T]` with segments of these lengths."""
    rng = np.random.default_rng(7)
    shape = (len(lengths), window_tokens)
    tokens = rng.integers(0, vocab_size, shape).astype(np.int32)
    positions, segment_ids = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, row_lengths in enumerate(lengths):
        start = 0
        for segment, length in enumerate(row_lengths, 1):
            positions[row, start : start + length] = np.arange(length)
            segment_ids[row, start : start + length] = segment
            start += length
    return tokens, positions, segment_ids


def segments(segment_ids: np.ndarray) -> list[tuple[int, slice]]:
    found = []
    for row, ids in enumerate(segment_ids):
        for segment in range(1, ids.max() + 1):
            at = np.flatnonzero(ids == segment)
            found.append((row, slice(at[0], at[-1] + 1)))
    return found


# ---- packed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "window_tokens", "lengths"),
    [
        (TINY, 24, [[5, 1, 18], [24], [7, 2]]),
        (TINY, 150, [[70, 3, 66], [130]]),  # segments across the attention's query blocks of 64
        (DEEP, 12, [[4, 8], [11]]),  # a scanned stack instead of an unrolled one
    ],
)
def test_packed_states_equal_float64_oracle(config: ModelConfig, window_tokens: int, lengths: list[list[int]]) -> None:
    params = parameters(config)
    tensors = decoder.flatten_parameters(params)
    tokens, positions, segment_ids = packed(lengths, window_tokens, config.vocab_size)
    states = np.asarray(hidden_states(params, config, tokens, positions, segment_ids))
    for row, part in segments(segment_ids):
        expected = oracle.hidden_states(tensors, config, tokens[row, part])
        np.testing.assert_allclose(states[row, part], expected, atol=2e-5, rtol=0)
    assert np.isfinite(states).all(), "padding too"


def test_gradient_equals_unpacked() -> None:
    tokens, positions, segment_ids = packed([[5, 7, 5], [7, 7]], 20, TINY.vocab_size)
    weights = np.random.default_rng(0).normal(size=(2, 20, TINY.model_width)).astype(np.float32)
    weights[segment_ids == 0] = 0

    @jax.jit
    @jax.grad
    def gradient(params: decoder.Params, *windows: np.ndarray) -> jax.Array:
        return (decoder.hidden_states(params, TINY, *windows[:3]) * windows[3]).sum()

    got = decoder.flatten_parameters(gradient(parameters(), tokens, positions, segment_ids, weights))
    expected = {name: np.zeros_like(leaf) for name, leaf in got.items()}
    for row, part in segments(segment_ids):
        order = np.arange(part.stop - part.start, dtype=np.int32)[None]
        alone = gradient(parameters(), tokens[row, part][None], order, np.ones_like(order), weights[row, part][None])
        for name, leaf in decoder.flatten_parameters(alone).items():
            expected[name] += leaf
    for name, leaf in expected.items():
        np.testing.assert_allclose(got[name], leaf, atol=2e-5 * np.abs(leaf).max(), rtol=0, err_msg=name)


def test_other_segments_and_padding_change_nothing() -> None:
    tokens, positions, segment_ids = packed([[6, 8]], 20, TINY.vocab_size)
    other = tokens.copy()
    other[0, :6] = (other[0, :6] + 1) % TINY.vocab_size
    other[0, 14:] = (other[0, 14:] + 5) % TINY.vocab_size
    first, second = (np.asarray(hidden_states(parameters(), TINY, t, positions, segment_ids)) for t in (tokens, other))
    np.testing.assert_array_equal(first[0, 6:14], second[0, 6:14])
    assert not np.allclose(first[0, :6], second[0, :6])


def test_an_empty_window_has_a_zero_gradient() -> None:
    tokens, positions, segment_ids = packed([[]], 8, TINY.vocab_size)

    def loss(params: decoder.Params) -> jax.Array:
        states = decoder.hidden_states(params, TINY, tokens, positions, segment_ids)
        logprobs, _ = decoder.token_logprobs(params, TINY, states, tokens, 1.0)
        return jnp.where(segment_ids > 0, logprobs, 0).sum()

    for name, leaf in decoder.flatten_parameters(jax.jit(jax.grad(loss))(parameters())).items():
        np.testing.assert_array_equal(leaf, 0, err_msg=name)


# ---- log probabilities ------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_tokens", [1024, 12, 7])
def test_logprobs_and_entropy_equal_float64_oracle(chunk_tokens: int) -> None:
    """Chunks that hold all, divide, and do not divide the 36 tokens."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(3, 12, TINY.model_width)).astype(np.float32)
    targets = rng.integers(0, TINY.vocab_size, (3, 12)).astype(np.int32)
    temperature = rng.uniform(0.3, 2.0, (3, 12)).astype(np.float32)
    config = dataclasses.replace(TINY, logprob_chunk_tokens=chunk_tokens)
    got = token_logprobs(parameters(), config, hidden, targets, temperature)
    tensors = decoder.flatten_parameters(parameters())
    for row in range(3):
        expected = oracle.logprobs_and_entropy(tensors, hidden[row], targets[row], temperature[row])
        for values, reference in zip(got, expected, strict=True):
            np.testing.assert_allclose(values[row], reference, atol=2e-5, rtol=0)


def test_wide_vocabularies_take_smaller_chunks() -> None:
    assert decoder.default_chunk_tokens(2048) == decoder.default_chunk_tokens(32_768) == 1024
    assert decoder.default_chunk_tokens(131_072) == 256
    assert decoder.default_chunk_tokens(2**30) == 1


def test_scalar_temperature_is_every_token_s() -> None:
    hidden = np.random.default_rng(0).normal(size=(1, 5, TINY.model_width)).astype(np.float32)
    targets = np.arange(5, dtype=np.int32)[None]
    scalar = token_logprobs(parameters(), TINY, hidden, targets, 0.7)
    full = token_logprobs(parameters(), TINY, hidden, targets, np.full((1, 5), 0.7, np.float32))
    np.testing.assert_array_equal(scalar, full)


def test_chunked_gradient_equals_whole_gradient() -> None:
    rng = np.random.default_rng(1)
    hidden = rng.normal(size=(2, 10, TINY.model_width)).astype(np.float32)
    targets = rng.integers(0, TINY.vocab_size, (2, 10)).astype(np.int32)

    def loss(head: jax.Array, states: jax.Array, chunk_tokens: int) -> jax.Array:
        logprobs, _ = decoder.token_logprobs(
            {"head": head}, dataclasses.replace(TINY, logprob_chunk_tokens=chunk_tokens), states, targets, 0.8
        )
        return (logprobs * jnp.arange(20).reshape(2, 10)).sum()

    def plain(head: jax.Array, states: jax.Array) -> jax.Array:
        logprobs = jax.nn.log_softmax(states @ head / 0.8)
        chosen = jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
        return (chosen * jnp.arange(20).reshape(2, 10)).sum()

    head = parameters()["head"]
    expected = jax.jit(jax.grad(plain, argnums=(0, 1)))(head, hidden)
    got = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)(head, hidden, 6)
    for values, reference in zip(got, expected, strict=True):
        np.testing.assert_allclose(values, reference, atol=1e-5 * np.abs(reference).max(), rtol=0)


def _sizes(jaxpr: jax.extend.core.Jaxpr) -> list[int]:
    """Sizes of all intermediate arrays, those of inner loops and calls included."""
    found = []
    for equation in jaxpr.eqns:
        found += [variable.aval.size for variable in equation.outvars]
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += _sizes(inner)
    return found


def test_all_logits_are_never_held() -> None:
    """Forward and backward: nothing is as large as `[B, T, V]`."""
    hidden = np.zeros((4, 64, TINY.model_width), np.float32)
    targets = np.zeros((4, 64), np.int32)

    def loss(params: decoder.Params, states: jax.Array) -> jax.Array:
        return decoder.token_logprobs(params, dataclasses.replace(TINY, logprob_chunk_tokens=32), states, targets, 1.0)[
            0
        ].sum()

    sizes = _sizes(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(parameters(), hidden).jaxpr)
    assert max(sizes) >= 32 * TINY.vocab_size, "the walk sees the loop's body"
    assert max(sizes) < targets.size * TINY.vocab_size


# ---- cached -----------------------------------------------------------------------------------------


def packed_logits(tokens: np.ndarray) -> np.ndarray:
    """`tokens [N, T]`, each row a trajectory -> logits `[N, T, V]` by the packed path."""
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    states = hidden_states(parameters(), TINY, tokens, positions, np.ones_like(tokens))
    return np.asarray(states) @ parameters()["head"]


def test_cached_logits_equal_packed_ones_however_the_tokens_come() -> None:
    """Chunks of all lengths, idle rows, interleaved decodes, slots in any order, cache full of rubbish."""
    num_slots, context, num_rows, chunk = 5, 24, 3, 4
    rng = np.random.default_rng(11)
    tokens = rng.integers(0, TINY.vocab_size, (num_slots, context)).astype(np.int32)
    expected = packed_logits(tokens)
    params = jax.device_get(decoder.serving_parameters(parameters()))
    cache = jax.tree.map(lambda leaf: leaf + 7.0, decoder.init_cache(TINY, num_slots, context + chunk))
    held = np.zeros(num_slots, np.int32)
    num_checked = 0
    while held.min() < context:
        if rng.random() < 0.6:
            slots = rng.choice(num_slots, num_rows, replace=False).astype(np.int32)
            lengths = np.minimum(rng.integers(0, chunk + 1, num_rows), context - held[slots]).astype(np.int32)
            rows = rng.integers(0, TINY.vocab_size, (num_rows, chunk)).astype(np.int32)
            for row, slot in enumerate(slots):
                rows[row, : lengths[row]] = tokens[slot, held[slot] : held[slot] + lengths[row]]
            cache, logits = extend(params, TINY, cache, slots, rows, held[slots], lengths)
            held[slots] += lengths
            busy = lengths > 0
            np.testing.assert_allclose(logits[busy], expected[slots[busy], held[slots[busy]] - 1], atol=1e-5)
        else:
            # A slot that waits decodes a token of no consequence at its next position.
            alive = (rng.random(num_slots) < 0.5) & (held < context)
            at = np.minimum(held, context - 1)
            fed = np.where(alive, tokens[np.arange(num_slots), at], 0).astype(np.int32)
            cache, logits = decode(params, TINY, cache, fed, held.copy())
            np.testing.assert_allclose(logits[alive], expected[alive, held[alive]], atol=1e-5)
            held += alive
            busy = alive
        num_checked += int(busy.sum())
    assert num_checked > 20


def test_an_idle_row_does_not_touch_the_slot_of_a_busy_one() -> None:
    tokens = np.random.default_rng(2).integers(0, TINY.vocab_size, (1, 6)).astype(np.int32)
    cache = decoder.init_cache(TINY, 3, 8)
    slots = np.array([1, 1, 1], np.int32)
    rows = np.concatenate([tokens * 0 + 3, tokens, tokens * 0 + 5])
    cache, logits = extend(
        parameters(), TINY, cache, slots, rows, np.array([2, 0, 0], np.int32), np.array([0, 6, 0], np.int32)
    )
    np.testing.assert_allclose(logits[1], packed_logits(tokens)[0, 5], atol=1e-5)
    cache = jax.device_get(cache)
    for keys, values in zip(cache.keys, cache.values, strict=True):
        assert not keys[[0, 2]].any()
        assert not values[[0, 2]].any()
        assert not keys[1, :, :, 6:].any(), "only its own tokens"
        assert keys[1, :, :, :6].any()


def test_nothing_is_written_at_or_past_the_end_of_the_context() -> None:
    before = jax.device_get(decoder.init_cache(TINY, 2, 4))
    cache, _ = decode(
        parameters(), TINY, decoder.init_cache(TINY, 2, 4), np.array([1, 2], np.int32), np.array([4, 9], np.int32)
    )
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(cache), before)


def test_stacked_and_serving_parameters_are_the_same_policy() -> None:
    tokens, positions = np.array([3, 4], np.int32), np.array([0, 0], np.int32)
    results = [
        decode(params, TINY, decoder.init_cache(TINY, 2, 4), tokens, positions)[1]
        for params in (parameters(), decoder.serving_parameters(parameters()))
    ]
    np.testing.assert_array_equal(*results)

"""The decoder's forward passes: packed windows for training, a key-value cache for sampling.

Both run the same `layers.Block` over the same parameters and differ in how tokens see each other.

A cache slot holds one session's keys and values from position 0. Entries at or past a session's
length are rubbish and never seen: a query at position p attends to entries 0..p only, and each of
those was written by the session itself. So a slot needs no clearing, and a decode of a slot whose
session waits may write at the session's next position without harm: the next `extend` overwrites it.

Shapes: B windows, T tokens, D model width, V vocabulary, L layers; N cache slots, S context tokens,
R rows, C chunk tokens, K kv heads, E head width. The serving half never reads more of a slot than it is
told to (`context_tokens`), so what a dispatch costs follows the conversations, not the cache.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tunix_core.distributed.parallel import ALONE, Parallel
from tunix_core.model_config import ModelConfig
from tunix_core.models.attention import Mix, Scores, attend, packed_mix
from tunix_core.models.layers import Angles, Setting, rotation
from tunix_core.models.parameters import (
    Params,
    abstract_parameters,
    block,
    final_norm,
    flatten_parameters,
    init_parameters,
    unflatten_parameters,
)
from tunix_core.models.partitioning import GATHERED, gather_layer

__all__ = [
    "Cache",
    "Params",
    "abstract_parameters",
    "decode",
    "extend",
    "flatten_parameters",
    "hidden_states",
    "init_cache",
    "init_parameters",
    "put_entries",
    "serving_parameters",
    "take_rows",
    "token_logprobs",
    "unflatten_parameters",
]


UNROLLED_LAYERS = 4
"""Shallow decoders unroll the layer scan: a quarter less backward time on CPU, where the scan copies
each layer's residuals. Deep ones keep it, for compile time."""


def hidden_states(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
) -> jax.Array:
    """Final hidden states of packed windows; a token attends to its own segment, causally.

    Args:
        tokens: int32 `[B, T]`.
        positions: int32 `[B, T]`, restarting at 0 with each segment.
        segment_ids: int32 `[B, T]`, contiguous; 0 is padding.

    Returns:
        `[B, T, D]` in the compute type, normalised, ready for the head. Entry t predicts token t + 1.
    """
    x = embed(params, config, tokens)
    x = run_blocks(params["blocks"], config, x, positions, segment_ids)
    return final_norm(config, params)(x)


def run_blocks(
    blocks: Params,
    config: ModelConfig,
    x: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    parallel: Parallel = ALONE,
) -> jax.Array:
    """The layers, of this device's stage: `[B, T, D]` -> `[B, T, D]`, not yet normalised."""
    angles, local_angles = rotations(config, positions)
    scores = Scores(config.query_scale, config.attention_softcap)
    num_tokens = positions.shape[1]

    def layer(x: jax.Array, of_layer: tuple[Params, Any]) -> tuple[jax.Array, None]:
        weights, local = of_layer
        if config.sliding_window:
            own = jax.tree.map(lambda near, far: jnp.where(local, near, far), local_angles, angles)
            visible = jnp.where(local, config.sliding_window, num_tokens)
        else:
            own, visible = angles, None
        mix = packed_mix(segment_ids, scores, backend=config.attention, visible_tokens=visible)
        weights = gather_layer(weights, parallel, config.compute_dtype)
        return block(config, weights)(x, Setting(own, mix, parallel))[0], None

    if config.remat != "none" or parallel.fsdp > 1:
        layer = jax.checkpoint(layer, prevent_cse=False, policy=_kept_for_backward(config))
    num_layers = config.num_layers // parallel.stage
    locals_ = jnp.array([config.is_local(i) for i in range(config.num_layers)]).reshape(parallel.stage, num_layers)
    of_stage = locals_[parallel.index("stage")]
    unroll = num_layers if num_layers <= UNROLLED_LAYERS else 1
    return jax.lax.scan(layer, x, (blocks, of_stage), unroll=unroll)[0]


def _kept_for_backward(config: ModelConfig) -> Any:
    """What the backward pass finds instead of computing it again; never a weight that was gathered for its layer."""
    policies = jax.checkpoint_policies
    match config.remat:
        case "none":
            return policies.save_anything_except_these_names(GATHERED)
        case "matmuls":
            return policies.dots_with_no_batch_dims_saveable
        case "layer":
            return policies.nothing_saveable


def rotations(config: ModelConfig, positions: jax.Array) -> tuple[Angles, Angles]:
    """Of layers that attend to all, and of local ones."""
    angles = rotation(positions, config)
    return angles, rotation(positions, config, local=True) if config.local_rope_theta else angles


def embed(params: Params, config: ModelConfig, tokens: jax.Array, parallel: Parallel = ALONE) -> jax.Array:
    """int `[B, T]` -> `[B, T, D]` in the compute type; on a tensor axis the device's part of T."""
    table = params["embedding"]
    if parallel.fsdp > 1:
        # What travels is in the compute type; the gradient adds up over tokens in float32.
        table = parallel.gather(table.astype(config.compute_dtype), 1).astype(jnp.float32)
    if parallel.tensor > 1:
        own = tokens - parallel.index("tensor") * table.shape[0]
        found = (own >= 0) & (own < table.shape[0])
        x = jnp.where(found[..., None], table[jnp.where(found, own, 0)], 0)
    else:
        x = table[tokens]
    x = parallel.leave(x.astype(config.compute_dtype))
    # The factor is rounded to the compute type, as Gemma's own code does.
    return x * jnp.asarray(config.model_width**0.5, x.dtype) if config.scaled_embeddings else x


def head_weight(params: Params, config: ModelConfig, parallel: Parallel = ALONE) -> jax.Array:
    """The vocabulary projection as it is stored, `[V, D]` if tied and else `[D, V]`, whole along fsdp."""
    weight, width_axis = (params["embedding"], 1) if config.tied_embeddings else (params["head"], 0)
    return parallel.gather(weight.astype(config.compute_dtype), width_axis) if parallel.fsdp > 1 else weight


def head_logits(weight: jax.Array, config: ModelConfig, states: jax.Array) -> jax.Array:
    """Normalised states `[..., D]` -> float32 logits `[..., V]`, or of the columns that `weight` has."""
    contraction = (((states.ndim - 1,), (1 if config.tied_embeddings else 0,)), ((), ()))
    logits = jax.lax.dot_general(states, weight.astype(states.dtype), contraction, preferred_element_type=jnp.float32)
    cap = config.logit_softcap
    return cap * jnp.tanh(logits / cap) if cap else logits


MAX_CHUNK_TOKENS = 1024
MAX_CHUNK_LOGITS = 2**25
"""128 MiB in float32: a wide vocabulary takes fewer tokens at a time."""


def default_chunk_tokens(vocab_size: int) -> int:
    """How many tokens are projected at a time: 1,024, fewer above a vocabulary of 32,768."""
    return max(1, min(MAX_CHUNK_TOKENS, MAX_CHUNK_LOGITS // vocab_size))


def token_logprobs(
    params: Params,
    config: ModelConfig,
    hidden: jax.Array,
    targets: jax.Array,
    temperature: jax.Array | float,
    parallel: Parallel = ALONE,
) -> tuple[jax.Array, jax.Array]:
    """Log probability of each target and entropy of its distribution, at the sampling temperature.

    The projection runs over chunks of tokens and again in the backward pass, so at most
    `[logprob_chunk_tokens, V]` logits exist at a time; on a tensor axis each device has its columns of V.

    Args:
        hidden: `[B, T, D]`, all T on every tensor device; entry t must be the state that predicts `targets[:, t]`.
        targets: int32 `[B, T]`.
        temperature: scalar or `[B, T]`; logits are divided by it.

    Returns:
        logprobs `[B, T]`, entropy `[B, T]` in nats (a diagnostic: no gradient flows through it); the same on all
            tensor devices.
    """
    shape = targets.shape
    num_tokens = targets.size
    chunk = min(config.logprob_chunk_tokens or default_chunk_tokens(config.vocab_size), num_tokens)
    num_chunks = -(-num_tokens // chunk)
    spare = num_chunks * chunk - num_tokens

    def chunked(x: jax.Array) -> jax.Array:
        flat = x.reshape(num_tokens, *x.shape[2:])
        flat = jnp.pad(flat, [(0, spare)] + [(0, 0)] * (flat.ndim - 1), mode="edge") if spare else flat
        return flat.reshape(num_chunks, chunk, *flat.shape[1:])

    weight = head_weight(params, config, parallel)
    columns = config.vocab_size // parallel.tensor
    first = parallel.index("tensor") * columns

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def project(part: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        states, labels, heat = part
        logits = head_logits(weight, config, states) / heat[:, None]
        largest = parallel.largest(jax.lax.stop_gradient(logits.max(axis=-1)), ("tensor",))
        shifted = logits - largest[:, None]
        weights = jnp.exp(shifted)
        total = parallel.total(weights.sum(axis=-1), ("tensor",))
        log_total = jnp.log(total)
        # A comparison instead of a gather: its transpose is a product, not a scatter.
        is_chosen = first + jnp.arange(columns) == labels[:, None]
        chosen = parallel.total(jnp.where(is_chosen, shifted, 0).sum(axis=-1), ("tensor",))
        mean = parallel.total(jax.lax.stop_gradient(weights * shifted).sum(axis=-1), ("tensor",)) / total
        return chosen - log_total, jax.lax.stop_gradient(log_total - mean)

    heat = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), shape)
    parts = (chunked(hidden), chunked(targets), chunked(heat))
    logprobs, entropy = jax.lax.map(project, parts)
    return tuple(x.reshape(-1)[:num_tokens].reshape(shape) for x in (logprobs, entropy))


class Cache(NamedTuple):
    """One array per layer: a stacked cache would be copied whole at every layer."""

    keys: tuple[jax.Array, ...]  # L of [N, K, E, S]
    values: tuple[jax.Array, ...]  # L of [N, K, S, E]


def init_cache(config: ModelConfig, num_slots: int, context_tokens: int) -> Cache:
    """An empty cache on the default device. Built in NumPy: nothing compiles."""
    shape = (num_slots, config.num_kv_heads)
    keys = np.zeros((*shape, config.head_width, context_tokens), jnp.dtype(config.compute_dtype))
    values = np.zeros((*shape, context_tokens, config.head_width), jnp.dtype(config.compute_dtype))
    layers = range(config.num_layers)
    return Cache(
        keys=tuple(jax.device_put(keys.copy()) for _ in layers),
        values=tuple(jax.device_put(values.copy()) for _ in layers),
    )


def serving_parameters(params: Params) -> Params:
    """The same parameters with `blocks` as a tuple of layers instead of stacked arrays.

    `extend` and `decode` take either form. With stacked arrays each call slices every weight, a
    copy per decode step inside a scan: unstack once per set of weights, or at the head of the dispatch.
    """
    if isinstance(params["blocks"], tuple):
        return params
    num_layers = jax.tree.leaves(params["blocks"])[0].shape[0]
    layers = tuple(jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"]) for i in range(num_layers))
    return {**params, "blocks": layers}


def _forward(
    params: Params, config: ModelConfig, tokens: jax.Array, positions: jax.Array, mixes: list[Mix]
) -> tuple[jax.Array, list[Any]]:
    """Hidden states `[R, C, D]` before the final norm, and each layer's updated memory."""
    angles, local_angles = rotations(config, positions)
    x = embed(params, config, tokens)
    memories = []
    for number, (weights, mix) in enumerate(zip(serving_parameters(params)["blocks"], mixes, strict=True)):
        setting = Setting(local_angles if config.is_local(number) else angles, mix)
        x, memory = block(config, weights)(x, setting)
        memories.append(memory)
    return x, memories


def _logits(params: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
    return head_logits(head_weight(params, config), config, final_norm(config, params)(x))


def _masks(config: ModelConfig, positions: jax.Array, context_tokens: int) -> list[jax.Array]:
    """Per layer bool `[R, C, S]`: which cache entries the queries at `positions [R, C]` see."""
    distance = positions[:, :, None] - jnp.arange(context_tokens)
    far = distance >= 0
    near = far & (distance < config.sliding_window) if config.sliding_window else far
    return [near if config.is_local(layer) else far for layer in range(config.num_layers)]


def take_rows(cache: Cache, slots: jax.Array, context_tokens: int) -> Cache:
    """The first `context_tokens` entries of some slots: keys `[R, K, E, S']`, values `[R, K, S', E]`, copies.

    Args:
        slots: int32 `[R]`; one out of range reads the last slot.
        context_tokens: S', at most S; static.
    """
    return Cache(
        keys=tuple(keys[:, :, :, :context_tokens].at[slots].get(mode="clip") for keys in cache.keys),
        values=tuple(values[:, :, :context_tokens].at[slots].get(mode="clip") for values in cache.values),
    )


def put_entries(cache: Cache, rows: Cache, slots: jax.Array, starts: jax.Array, num_tokens: int) -> Cache:
    """Write entries `starts[r]` to `starts[r] + num_tokens` of `rows` back to the slots they were taken from.

    Args:
        rows: as `take_rows` gives them, R of them.
        slots: int32 `[R]`, distinct; a row whose slot is out of range is dropped.
        starts: int32 `[R]`, each at most S' - `num_tokens`.
        num_tokens: how many entries are written; static.
    """

    def write(whole: jax.Array, part: jax.Array, axis: int) -> jax.Array:
        window = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, num_tokens, axis - 1))
        return jax.lax.scatter(
            whole,
            jnp.stack([slots, starts], axis=1),
            window(part, starts),
            jax.lax.ScatterDimensionNumbers(
                update_window_dims=(1, 2, 3), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, axis)
            ),
            unique_indices=True,
            mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
        )

    return Cache(
        keys=tuple(write(*layer, axis=3) for layer in zip(cache.keys, rows.keys, strict=True)),
        values=tuple(write(*layer, axis=2) for layer in zip(cache.values, rows.values, strict=True)),
    )


def extend(
    params: Params,
    config: ModelConfig,
    cache: Cache,
    slots: jax.Array,
    tokens: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    context_tokens: int | None = None,
) -> tuple[Cache, jax.Array]:
    """Append a chunk of tokens to some slots.

    Args:
        slots: int32 `[R]`, distinct among the rows with tokens.
        tokens: int32 `[R, C]`, of which the first `lengths[r]` count.
        starts: int32 `[R]`, the position of each row's first token; the slot must hold all before.
            `starts + C <= context_tokens`: entries behind a row's tokens are overwritten with rubbish.
        lengths: int32 `[R]`, 0 to C; a row of length 0 changes nothing.
        context_tokens: how much of the cache is read, static; all of it by default.

    Returns:
        The cache, and the logits `[R, V]` after each row's last token (meaningless at length 0).
    """
    num_slots, _, _, capacity = cache.keys[0].shape
    context_tokens = context_tokens or capacity
    chunk = tokens.shape[1]
    positions = starts[:, None] + jnp.arange(chunk)  # [R, C]
    masks = _masks(config, positions, context_tokens)
    scores = Scores(config.query_scale, config.attention_softcap)

    def mix_into(keys: jax.Array, values: jax.Array, allowed: jax.Array) -> Mix:
        def put(rows: jax.Array, new: jax.Array, axis: int) -> jax.Array:
            insert = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=axis - 1)
            return jax.vmap(insert)(rows, new, starts)

        def mix(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, Any]:
            row_keys = put(keys, key.transpose(0, 2, 3, 1), 3)
            row_values = put(values, value.transpose(0, 2, 1, 3), 2)
            return attend(query, row_keys, row_values, allowed, scores), (row_keys, row_values)

        return mix

    rows = take_rows(cache, slots, context_tokens)
    mixes = [mix_into(*layer) for layer in zip(*rows, masks, strict=True)]
    x, memories = _forward(params, config, tokens, positions, mixes)
    rows = Cache(*(tuple(part) for part in zip(*memories, strict=True)))
    # An idle row's slot may be another row's: it must not be written at all.
    cache = put_entries(cache, rows, jnp.where(lengths > 0, slots, num_slots), starts, chunk)
    last = jnp.maximum(lengths - 1, 0)
    x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
    return cache, _logits(params, config, x)


def decode(
    params: Params, config: ModelConfig, cache: Cache, tokens: jax.Array, positions: jax.Array
) -> tuple[Cache, jax.Array]:
    """Append one token to every slot.

    Args:
        tokens: int32 `[N]`.
        positions: int32 `[N]`, where each token goes; nothing is written at or past S. Pass a waiting
            session's next position, which is overwritten before it is read.

    Returns:
        The cache, and the logits `[N, V]` after each token.
    """
    num_slots, _, _, context_tokens = cache.keys[0].shape
    slots = jnp.arange(num_slots)
    masks = _masks(config, positions[:, None], context_tokens)
    scores = Scores(config.query_scale, config.attention_softcap)

    def mix_into(keys: jax.Array, values: jax.Array, allowed: jax.Array) -> Mix:
        def mix(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, Any]:
            new_keys = keys.at[slots, :, :, positions].set(key[:, 0], mode="drop")
            new_values = values.at[slots, :, positions].set(value[:, 0], mode="drop")
            return attend(query, new_keys, new_values, allowed, scores), (new_keys, new_values)

        return mix

    mixes = [mix_into(*layer) for layer in zip(*cache, masks, strict=True)]
    x, memories = _forward(params, config, tokens[:, None], positions[:, None], mixes)
    return Cache(*(tuple(part) for part in zip(*memories, strict=True))), _logits(params, config, x[:, 0])

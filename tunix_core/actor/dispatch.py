"""The compiled half of the engine: prefill a chunk, decode a few steps, copy a prefix; every shape known before.

All are ahead-of-time executables, so an unexpected shape is an error and never a compilation. Each
comes in a few sizes: of rows, of chunk tokens, and of the context that it reads. A dispatch gathers the
rows that it is for and writes back only the entries that are new: with tools that take their time most
slots wait, and long contexts are mostly read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tunix_core.actor import sampling
from tunix_core.actor.planning import sizes
from tunix_core.actor.sampling import Draws, Kind, Limits
from tunix_core.config import ActorConfig, ModelConfig
from tunix_core.models import decoder

Params = decoder.Params
Cache = decoder.Cache

_ALIGNMENT = 16
"""Entries of a cache row come in multiples of so many: a vector of floats."""


_MIN_ROWS = 2
"""Of a dispatch. Of a single one XLA makes slices and an update instead of a gather and a scatter; on CPU it then
copies the whole cache, twice."""


class EngineSizes(NamedTuple):
    """What the executables' shapes depend on; every tuple rises."""

    num_slots: int
    prefill_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    decode_rows: tuple[int, ...]
    contexts: tuple[int, ...]
    """Entries of a cache row that a dispatch may read; the last is the whole row. It is longer than the
    context by what a dispatch may write behind a conversation's end."""
    decode_steps: int
    copy_rows: int
    stop_ids: tuple[int, ...]
    """Ids at which a row stops."""

    @property
    def prefill_shapes(self) -> tuple[tuple[int, int], ...]:
        return tuple((rows, chunk) for rows in self.prefill_rows for chunk in self.prefill_tokens)


def engine_sizes(actor: ActorConfig, stop_ids: tuple[int, ...]) -> EngineSizes:
    """The sizes that a configuration names."""
    chunk = min(actor.prefill_tokens, actor.context_tokens)
    steps = min(actor.decode_steps, actor.context_tokens)
    whole = actor.context_tokens + max(chunk, steps)
    whole += -whole % _ALIGNMENT
    prefill_rows = min(actor.prefill_rows, actor.num_slots)
    decode_rows = min(actor.decode_rows, actor.num_slots)
    contexts = [size + -size % _ALIGNMENT for size in sizes(whole, actor.context_sizes)]
    return EngineSizes(
        num_slots=actor.num_slots,
        prefill_rows=sizes(prefill_rows, actor.prefill_row_sizes, factor=4, smallest=_MIN_ROWS),
        prefill_tokens=sizes(chunk, actor.prefill_token_sizes),
        decode_rows=sizes(decode_rows, actor.decode_row_sizes, smallest=_MIN_ROWS),
        # One that hardly holds what a dispatch writes is of no use.
        contexts=tuple(size for size in contexts if size >= 2 * max(chunk, steps) or size == whole),
        decode_steps=steps,
        copy_rows=max(prefill_rows, _MIN_ROWS),
        stop_ids=stop_ids,
    )


@functools.lru_cache(maxsize=16)
def executables(model: ModelConfig, sizes: EngineSizes, kind: Kind) -> Executables:
    """Compiled once per process for equal arguments: engines of equal shapes share them."""
    return Executables(model, sizes, kind)


class Executables:
    """Compiled `extend`, `decode` and `copy` of one engine, by their sizes.

    N slots, R rows of a prefill or copy, C tokens of a chunk, A rows of a decode, K decode steps, S entries read.
    """

    def __init__(self, model: ModelConfig, sizes: EngineSizes, kind: Kind) -> None:
        self._model = model
        self._kind = kind
        self._num_steps = sizes.decode_steps
        self._num_slots = sizes.num_slots
        self._stop_ids = np.array(sizes.stop_ids, np.int32)
        params = jax.eval_shape(decoder.serving_parameters, decoder.abstract_parameters(model))
        cache = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
            decoder.init_cache(model, sizes.num_slots, sizes.contexts[-1]),
        )
        self.extend = {
            (rows, chunk, context): _compile(
                functools.partial(self._extend, context),
                params,
                cache,
                _ints(rows),
                _ints(rows, chunk),
                _ints(rows),
                _ints(rows),
                self._draws(rows),
            )
            for rows, chunk in sizes.prefill_shapes
            for context in sizes.contexts
        }
        """(params, cache, slots [R], tokens [R, C], starts [R], lengths [R], draws of R)
        -> (cache, tokens [R], logprobs [R]): append, then draw what follows. By (R, C, S)."""
        self.decode = {
            (rows, context): _compile(
                functools.partial(self._decode, context),
                params,
                cache,
                *(_ints(rows) for _ in range(4)),
                _ints(),
                self._draws(rows),
            )
            for rows in sizes.decode_rows
            for context in sizes.contexts
        }
        """(params, cache, slots [A], tokens [A], positions [A], budgets [A], patience, draws of A)
        -> (cache, tokens [K, A], logprobs [K, A], counts [A], steps). By (A, S)."""
        rows = sizes.copy_rows
        self.copy = {
            context: _compile(functools.partial(self._copy, context), None, cache, _ints(rows), _ints(rows))
            for context in sizes.contexts
        }
        """(None, cache, sources [R], targets [R]) -> cache. By S."""

    def _draws(self, rows: int) -> Draws:
        def shape(dtype: Any, *rest: int) -> Any:
            return jax.ShapeDtypeStruct((rows, *rest), dtype)

        limits: Any = Limits(*(shape(dtype) for dtype in (bool, jnp.int32, jnp.float32, jnp.float32)))
        return Draws(shape(jnp.uint32, 2), shape(jnp.float32), limits if self._kind == "any" else None)

    def _extend(
        self,
        context: int,
        params: Params,
        cache: Cache,
        slots: jax.Array,
        tokens: jax.Array,
        starts: jax.Array,
        lengths: jax.Array,
        draws: Draws,
    ) -> tuple[Cache, jax.Array, jax.Array]:
        cache, logits = decoder.extend(params, self._model, cache, slots, tokens, starts, lengths, context)
        return cache, *sampling.draw(self._kind, logits, starts + lengths, draws)

    def _copy(self, context: int, _params: None, cache: Cache, sources: jax.Array, targets: jax.Array) -> Cache:
        rows = decoder.take_rows(cache, sources, context)
        return decoder.put_entries(cache, rows, targets, jnp.zeros_like(targets), context)

    def _decode(
        self,
        context: int,
        params: Params,
        cache: Cache,
        slots: jax.Array,
        tokens: jax.Array,
        positions: jax.Array,
        budgets: jax.Array,
        patience: jax.Array,
        draws: Draws,
    ) -> tuple[Cache, jax.Array, jax.Array, jax.Array, jax.Array]:
        """Up to K steps, until all rows have ended or those that have would cost over `patience` steps of a row."""
        num_rows, num_steps = tokens.shape[0], self._num_steps
        started = budgets > 0

        def going(state: tuple[Any, ...]) -> jax.Array:
            step, wasted, budgets = state[0], state[1], state[5]
            return (step < num_steps) & jnp.any(budgets > 0) & (wasted <= patience)

        def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
            k, wasted, rows, tokens, positions, budgets, all_tokens, all_logprobs = state
            rows, logits = decoder.decode(params, self._model, rows, tokens, positions)
            drawn, logprobs = sampling.draw(self._kind, logits, positions + 1, draws)
            live = budgets > 0
            tokens = jnp.where(live, drawn, tokens)
            all_tokens = all_tokens.at[k].set(tokens)
            all_logprobs = all_logprobs.at[k].set(logprobs)
            positions = positions + live
            ended = (tokens[:, None] == self._stop_ids).any(-1)
            budgets = jnp.where(live & ~ended, budgets - 1, 0)
            wasted += (started & (budgets == 0)).sum(dtype=jnp.int32)
            return k + 1, wasted, rows, tokens, positions, budgets, all_tokens, all_logprobs

        state = (
            jnp.int32(0),
            jnp.int32(0),
            decoder.take_rows(cache, slots, context),
            tokens,
            positions,
            budgets,
            jnp.zeros((num_steps, num_rows), jnp.int32),
            jnp.zeros((num_steps, num_rows), jnp.float32),
        )
        k, _, rows, _, ends, _, all_tokens, all_logprobs = jax.lax.while_loop(going, step, state)
        cache = decoder.put_entries(cache, rows, slots, positions, num_steps)
        return cache, all_tokens, all_logprobs, ends - positions, k


def _compile(function: Callable[..., Any], *shapes: Any) -> Any:
    return jax.jit(function, donate_argnums=(1,)).lower(*shapes).compile()


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def device_parameters(params: Params) -> Params:
    """Weights on the device in the form the executables take; compiles nothing, may run in any thread."""
    if isinstance(params["blocks"], tuple):
        return params
    on_host = jax.tree.map(np.asarray, params)
    return jax.block_until_ready(jax.device_put(decoder.serving_parameters(on_host)))

"""The compiled half of the engine: prefill a chunk, decode a few steps; every shape known before.

Both are ahead-of-time executables, so an unexpected shape is an error and never a compilation.
A decode gathers some of the rows that generate and puts them back after a handful of steps: with
tools that take their time most slots wait, and a dense decode would pay for all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tunix_core.actor import sampling
from tunix_core.config import ModelConfig
from tunix_core.models import decoder

Params = decoder.Params
Cache = decoder.Cache


class EngineSizes(NamedTuple):
    """What the executables' shapes depend on."""

    num_slots: int
    context_tokens: int
    prefill_rows: int
    prefill_tokens: int
    decode_rows: int
    decode_steps: int
    end_of_turn: int
    """The id at which a row stops."""


@functools.lru_cache(maxsize=16)
def executables(model: ModelConfig, sizes: EngineSizes, *, greedy: bool) -> Executables:
    """Compiled once per process for equal arguments: engines of equal shapes share them."""
    return Executables(model, sizes, greedy=greedy)


class Executables:
    """Compiled `extend` and `decode` of one engine.

    N slots, S context tokens, R prefill rows, C prefill tokens, A rows of a decode, K decode steps.
    """

    def __init__(self, model: ModelConfig, sizes: EngineSizes, *, greedy: bool) -> None:
        self._model = model
        self._greedy = greedy
        self._num_steps = sizes.decode_steps
        self._end_of_turn = sizes.end_of_turn
        shape = jax.eval_shape(decoder.serving_parameters, decoder.abstract_parameters(model))
        cache = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
            decoder.init_cache(model, sizes.num_slots, sizes.context_tokens),
        )
        rows, chunk = sizes.prefill_rows, sizes.prefill_tokens
        self.extend = _compile(
            self._extend,
            shape,
            cache,
            _ints(rows),
            _ints(rows, chunk),
            _ints(rows),
            _ints(rows),
            *_request_shapes(rows),
        )
        """(params, cache, slots [R], tokens [R, C], starts [R], lengths [R], keys [R, 2],
        temperatures [R]) -> (cache, tokens [R], logprobs [R]): append, then draw what follows."""
        size = sizes.decode_rows
        self.decode = _compile(
            self._decode_rows if size < sizes.num_slots else self._decode_all,
            shape,
            cache,
            *(_ints(size) for _ in range(4)),
            *_request_shapes(size),
        )
        """(params, cache, slots [A], tokens [A], positions [A], budgets [A], keys [A, 2],
        temperatures [A]) -> (cache, tokens [K, A], logprobs [K, A], counts [A])."""

    def _draw(
        self, logits: jax.Array, keys: jax.Array, positions: jax.Array, temperatures: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        if self._greedy:
            return sampling.greedy(logits)
        return sampling.sample(logits, keys, positions, temperatures)

    def _extend(
        self,
        params: Params,
        cache: Cache,
        slots: jax.Array,
        tokens: jax.Array,
        starts: jax.Array,
        lengths: jax.Array,
        keys: jax.Array,
        temperatures: jax.Array,
    ) -> tuple[Cache, jax.Array, jax.Array]:
        cache, logits = decoder.extend(params, self._model, cache, slots, tokens, starts, lengths)
        drawn, logprobs = self._draw(logits, keys, starts + lengths, temperatures)
        return cache, drawn, logprobs

    def _decode_rows(
        self, params: Params, cache: Cache, slots: jax.Array, *rows: jax.Array
    ) -> tuple[Cache, jax.Array, jax.Array, jax.Array]:
        part = jax.tree.map(lambda leaf: leaf[slots], cache)
        part, *drawn = self._decode_all(params, part, slots, *rows)
        cache = jax.tree.map(lambda leaf, new: leaf.at[slots].set(new, unique_indices=True), cache, part)
        return (cache, *drawn)  # type: ignore[return-value]  # three arrays by construction

    def _decode_all(
        self,
        params: Params,
        cache: Cache,
        _slots: jax.Array,
        tokens: jax.Array,
        positions: jax.Array,
        budgets: jax.Array,
        keys: jax.Array,
        temperatures: jax.Array,
    ) -> tuple[Cache, jax.Array, jax.Array, jax.Array]:
        num_rows, num_steps = tokens.shape[0], self._num_steps

        def going(state: tuple[Any, ...]) -> jax.Array:
            return (state[0] < num_steps) & jnp.any(state[4] > 0)

        def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
            k, cache, tokens, positions, budgets, all_tokens, all_logprobs = state
            cache, logits = decoder.decode(params, self._model, cache, tokens, positions)
            drawn, logprobs = self._draw(logits, keys, positions + 1, temperatures)
            live = budgets > 0
            tokens = jnp.where(live, drawn, tokens)
            all_tokens = all_tokens.at[k].set(tokens)
            all_logprobs = all_logprobs.at[k].set(logprobs)
            positions = positions + live
            budgets = jnp.where(live & (tokens != self._end_of_turn), budgets - 1, 0)
            return k + 1, cache, tokens, positions, budgets, all_tokens, all_logprobs

        first = positions
        state = (
            jnp.int32(0),
            cache,
            tokens,
            positions,
            budgets,
            jnp.zeros((num_steps, num_rows), jnp.int32),
            jnp.zeros((num_steps, num_rows), jnp.float32),
        )
        _, cache, _, positions, _, all_tokens, all_logprobs = jax.lax.while_loop(going, step, state)
        return cache, all_tokens, all_logprobs, positions - first


def _compile(function: Callable[..., Any], *shapes: Any) -> Any:
    return jax.jit(function, donate_argnums=(1,)).lower(*shapes).compile()


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _request_shapes(rows: int) -> Sequence[jax.ShapeDtypeStruct]:
    return jax.ShapeDtypeStruct((rows, 2), jnp.uint32), jax.ShapeDtypeStruct((rows,), jnp.float32)


def device_parameters(params: Params) -> Params:
    """Weights on the device in the form the executables take; compiles nothing, may run in any thread."""
    if isinstance(params["blocks"], tuple):
        return params
    on_host = jax.tree.map(np.asarray, params)
    return jax.block_until_ready(jax.device_put(decoder.serving_parameters(on_host)))

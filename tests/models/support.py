"""What tests of models share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tunix_core.config import ModelConfig
from tunix_core.models import decoder


def window_logits(
    config: ModelConfig,
    params: decoder.Params,
    tokens: np.ndarray,
    chosen: Callable[[jax.Array], jax.Array] = lambda states: states,
    compiler_options: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """Logits of rows that are one segment each, `[B, T, V]`.

    Args:
        tokens: int `[B, T]`.
        chosen: of the states `[B, T, D]`, those whose logits are wanted.
    """

    def run(params: decoder.Params, tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        states = decoder.hidden_states(params, config, tokens, positions, jnp.ones_like(tokens))
        return decoder.head_logits(decoder.head_weight(params, config), config, chosen(states))

    options = None if compiler_options is None else dict(compiler_options)
    return np.asarray(jax.jit(run, compiler_options=options)(params, jnp.asarray(tokens, jnp.int32)))

"""What all attention backends share: how scores are made, and types under `shard_map`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

MASKED_SCORE = -1e30
"""Finite, so that a query that may see nothing (padding) still gets finite numbers."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """How scores are made of query and key."""

    scale: float
    softcap: float = 0.0
    """s becomes cap * tanh(s / cap); 0: off."""

    def __call__(self, query: jax.Array, keys: jax.Array) -> jax.Array:
        """`[..., Q, E], [..., E, S]` -> float32 `[..., Q, S]`."""
        scores = jnp.matmul(query, keys, preferred_element_type=jnp.float32) * self.scale
        return self.softcap * jnp.tanh(scores / self.softcap) if self.softcap else scores

    def raw_cotangent(self, cotangent: jax.Array, scores: jax.Array) -> jax.Array:
        """The cotangent of `query @ keys` from that of the scores it gave."""
        if self.softcap:
            cotangent = cotangent * (1 - (scores / self.softcap) ** 2)
        return cotangent * self.scale


def as_varying(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x` varying over the mesh axes that `like` varies over: what a loop carry under `shard_map` must match."""
    missing = jax.typeof(like).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
    return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x

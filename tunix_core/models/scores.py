"""How scores are made of queries and keys, the same in all attention backends."""

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

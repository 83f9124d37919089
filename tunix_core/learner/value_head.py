"""A scalar value of the state before each token: one linear map on the decoder's final hidden states.

It lives in the training state of a run that asks for it, beside the decoder's parameters: in its checkpoints, and
never in what is published, since nobody samples from it. It starts at zero, so that values do.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tunix_core.config import ModelConfig
from tunix_core.models.decoder import Params

NAME = "value_head"


def fresh(model: ModelConfig) -> Params:
    """Host arrays."""
    return {"weight": np.zeros(model.model_width, np.float32), "bias": np.zeros((), np.float32)}


def attached(params: Params, head: Params) -> Params:
    """The decoder's parameters and the head's as one tree."""
    return {**params, NAME: head}


def detached(params: Params) -> Params:
    """The decoder's parameters alone; the inverse of `attached`, and nothing where there is no head."""
    return {name: part for name, part in params.items() if name != NAME}


def values(params: Params, states: jax.Array) -> jax.Array:
    """`[M, W]` of hidden states `[M, W, D]`."""
    head = params[NAME]
    return jnp.einsum("mwd,d->mw", states.astype(jnp.float32), head["weight"]) + head["bias"]

"""A small decoder, an engine around it, and what the packed forward pass says of its tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tunix_core.actor.engine import Engine, TurnEnd
from tunix_core.config import ActorConfig, ModelConfig
from tunix_core.models import decoder

MODEL = ModelConfig(model_width=16, num_layers=2, num_heads=2, num_kv_heads=1, head_width=8, mlp_width=16)
ACTOR = ActorConfig(
    num_slots=8,
    context_tokens=48,
    max_turns=3,
    max_turn_tokens=7,
    decode_steps=3,
    prefill_rows=4,
    prefill_tokens=5,
)


def weights(seed: int, scale: float = 20.0) -> Any:
    """Random parameters, scaled so that distributions are far from uniform."""
    params = jax.tree.map(np.asarray, decoder.init_parameters(MODEL, seed))
    return {**params, "head": params["head"] * scale}


def engine(params: Any, version: int = 0, *, greedy: bool = False, **fields: Any) -> Engine:
    return Engine(MODEL, dataclasses.replace(ACTOR, **fields), params, version, greedy=greedy)


def run_until_parked(subject: Engine) -> list[TurnEnd]:
    """Dispatch until every turn has ended."""
    ended: list[TurnEnd] = []
    while subject.busy:
        ended += subject.run_once()
    return ended


def expected_logprobs(params: Any, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """[T]: log-probability of each token given those before it, by the packed pass; 0 for the first."""
    length = len(tokens)
    ids = jnp.asarray(tokens)[None]
    hidden = decoder.hidden_states(params, MODEL, ids, jnp.arange(length)[None], jnp.ones((1, length), jnp.int32))
    logprobs, _ = decoder.token_logprobs(params, MODEL, hidden[:, :-1], ids[:, 1:], temperature)
    return np.concatenate([[0.0], np.asarray(logprobs[0])])

"""A small decoder, an engine around it, and what the packed forward pass says of its tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tunix_core.actor.engine import Engine
from tunix_core.actor.policy_engine import TurnEnd
from tunix_core.actor.sampling import Kind
from tunix_core.config import ActorConfig, ModelConfig
from tunix_core.models import decoder
from tunix_core.tokenizer import ByteTokenizer

MODEL = ModelConfig(model_width=16, num_layers=2, num_heads=2, num_kv_heads=1, head_width=8, mlp_width=16)
ACTOR = ActorConfig(
    num_slots=8,
    context_tokens=48,
    max_turns=3,
    max_turn_tokens=7,
    decode_rows=4,
    decode_steps=3,
    prefill_rows=4,
    prefill_tokens=5,
    decode_row_sizes=1,
    prefill_row_sizes=1,
)


def weights(seed: int) -> Any:
    """Random parameters, scaled so that distributions are far from uniform; one token in ten ends a turn."""
    params = jax.tree.map(np.array, decoder.init_parameters(MODEL, seed))
    params["head"] *= 20
    # One hidden unit is nearly constant: a bias.
    params["embedding"][:, 0] = 0.05
    params["head"][0, ByteTokenizer.END_OF_TURN] = 1.5
    return params


def engine(params: Any, version: int = 0, *, sampling: Kind = "temperature", **fields: Any) -> Engine:
    return Engine(
        MODEL,
        dataclasses.replace(ACTOR, **fields),
        params,
        version,
        end_of_turn=ByteTokenizer.END_OF_TURN,
        decode=ByteTokenizer().decode,
        sampling=sampling,
    )


def run_until_parked(subject: Engine) -> list[TurnEnd]:
    """Dispatch until every turn has ended."""
    ended: list[TurnEnd] = []
    while subject.busy:
        ended += subject.run_once()
    return ended


@jax.jit
def _packed(params: Any, tokens: jax.Array, segments: jax.Array, temperature: jax.Array) -> jax.Array:
    positions = jnp.arange(tokens.shape[1])[None]
    hidden = decoder.hidden_states(params, MODEL, tokens, positions, segments)
    return decoder.token_logprobs(params, MODEL, hidden[:, :-1], tokens[:, 1:], temperature)[0]


def expected_logprobs(params: Any, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """[T]: log-probability of each token given those before it, by the packed pass; 0 for the first."""
    length = len(tokens)
    padded = np.zeros((1, ACTOR.context_tokens), np.int32)
    padded[0, :length] = tokens
    segments = (np.arange(ACTOR.context_tokens) < length).astype(np.int32)[None]
    logprobs = np.asarray(_packed(params, padded, segments, np.float32(temperature)))[0]
    return np.concatenate([[0.0], logprobs[: length - 1]])

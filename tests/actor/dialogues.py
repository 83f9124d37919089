"""Random conversations on an engine, and a full forward pass over each of them as the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tests.actor.support import ACTOR, MODEL
from tunix_core.actor.engine import Engine
from tunix_core.actor.policy_engine import Conversation, Request, TurnEnd
from tunix_core.actor.sampling import request_key
from tunix_core.models import decoder

VARIED: dict[str, Any] = {
    "decode_row_sizes": 2,
    "prefill_token_sizes": 2,
    "context_sizes": 2,
    "prefill_dispatches": 2,
    "shared_prefix_tokens": 4,
    "stop_ids": (90,),
}
"""Fields of an engine of several sizes each."""

SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"greedy": True},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.9, "top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
]
"""Every kind of setting that some engine accepts."""

_PROMPTS = [[256, *range(60, 60 + n), 257] for n in (1, 6, 14)]


class Played(NamedTuple):
    request: Request
    conversation: Conversation
    ends: list[TurnEnd]


class _Open(NamedTuple):
    request: Request
    ends: list[TurnEnd]


def play_at_random(
    subject: Engine, rng: np.random.Generator, weights: Sequence[Any], requests: Sequence[Request]
) -> dict[int, Any]:
    """Plays one conversation per request: tools that take a while, answers of any length, swaps in between.

    Args:
        weights: what the swaps go through in turn; the engine starts with whatever it has.

    Returns:
        `{"played": list[Played], "weights": version -> parameters}`, the latter of the swaps made here.
    """
    waiting, swapped = list(requests), {}
    active: dict[int, _Open] = {}
    played = []
    while waiting or active:
        if waiting and subject.num_free and rng.random() < 0.6:
            slot = subject.acquire(waiting[0])
            active[slot] = _Open(waiting.pop(0), [])
            subject.begin_turn(slot, _PROMPTS[rng.integers(len(_PROMPTS))])
        for end in subject.run_once():
            active[end.slot].ends.append(end)
        if rng.random() < 0.1 and subject.can_swap():
            version = subject.version + int(rng.integers(1, 4))
            swapped[version] = weights[len(swapped) % len(weights)]
            subject.swap(swapped[version], version)
        for slot in [slot for slot, one in active.items() if one.ends and one.ends[-1].end == len_of(subject, slot)]:
            if rng.random() < 0.5:
                continue  # its tool takes its time
            room = min(9, subject.room(slot))
            if len(active[slot].ends) >= 4 or room < 1:
                one = active.pop(slot)
                played.append(Played(one.request, subject.transcripts.conversation(slot), one.ends))
                subject.release(slot)
            else:
                answer = rng.integers(48, 58, int(rng.integers(1, room + 1))).tolist()
                subject.begin_turn(slot, answer, max_tokens=int(rng.integers(1, 9)))
    return {"played": played, "weights": swapped}


def len_of(subject: Engine, slot: int) -> int:
    return int(subject.transcripts.lengths[slot])


def mixed_requests(num: int, seed: str, settings: Sequence[Mapping[str, Any]]) -> list[Request]:
    """Of every setting in turn; each third one has a stop string."""
    strings = [(), (), tuple("ABCDEFGHIJKLMNOPQRSTUVWXYabcdefghijk")]
    return [
        Request(key=request_key(seed, i), stop_strings=strings[i % 3], **settings[i % len(settings)])
        for i in range(num)
    ]


@jax.jit
def _logits(params: Any, tokens: jax.Array) -> jax.Array:
    positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
    hidden = decoder.hidden_states(params, MODEL, tokens, positions, np.ones_like(positions))
    return decoder.head_logits(decoder.head_weight(params, MODEL), MODEL, hidden)


def recomputed_logprobs(params: Any, tokens: np.ndarray, request: Request) -> np.ndarray:
    """float64 [T]: of each token under the request's distribution, by the packed pass and a sort; 0 for the
    first, NaN where rounding decides what is cut off."""
    padded = np.zeros((1, ACTOR.context_tokens), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = np.asarray(_logits(params, padded))[0].astype(np.float64)
    found = [0.0]
    for position in range(1, len(tokens)):
        values = {_truncated(logits[position - 1], request, slack)[tokens[position]] for slack in (0.0, 1e-5, -1e-5)}
        found.append(values.pop() if len(values) == 1 else np.nan)
    return np.array(found)


def _truncated(logits: np.ndarray, request: Request, slack: float) -> np.ndarray:
    """float64 [V]: log-probabilities, minus infinity of what is cut off."""
    scaled = logits if request.greedy else logits / request.temperature
    order = np.argsort(-scaled, kind="stable")
    weights = np.exp(scaled - scaled.max())
    kept = np.zeros(len(logits), bool)
    first = order[: request.top_k or len(order)]
    mass = np.cumsum(weights[first]) / weights[first].sum()
    # Up to the one with which the mass is reached.
    kept[first[: np.searchsorted(mass, request.top_p + slack) + 1 if request.top_p < 1 else None]] = True
    kept &= weights >= request.min_p * (1 + slack)
    return np.where(kept, scaled - scaled.max() - np.log(weights[kept].sum()), -np.inf)


def check_logprobs(played: Played, weights: Mapping[int, Any]) -> set[int]:
    """Each policy token's log-probability is that of its version's weights; returns the versions."""
    tokens, mask, logprobs, versions = played.conversation
    assert (logprobs[~mask] == 0).all()
    assert (versions[~mask] == -1).all()
    for version in set(versions[mask].tolist()):
        mine = np.flatnonzero(mask & (versions == version))
        expected = recomputed_logprobs(weights[version], tokens, played.request)[mine]
        clear = ~np.isnan(expected)
        assert clear.mean() > 0.5
        np.testing.assert_allclose(logprobs[mine][clear], expected[clear], atol=1e-4)
    return set(versions[mask].tolist())

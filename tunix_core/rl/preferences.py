"""Learning from pairs: which of two answers to the same prompt is preferred.

A pair lies in a window as two adjacent segments, the chosen answer in an odd one (1, 3, …) and the rejected
one in the even one after it, each with the prompt before it. So both log probabilities of a pair are
sums over segments of one window.

Shapes: N windows, W tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tunix_core.rl.segments import segment_sum


class Pair(NamedTuple):
    """Sums over the two answers of each token's pair, `[N, W]`, constant over the pair."""

    chosen: jax.Array
    rejected: jax.Array


def dpo(
    chosen_logratio: jax.Array, rejected_logratio: jax.Array, beta: float, label_smoothing: float = 0.0
) -> jax.Array:
    """-log sigma(beta h) per pair, with h the chosen answer's log(policy / reference) minus the rejected one's.

    Direct preference optimisation (arXiv:2305.18290, eq. 7). With label smoothing e it is the conservative form, the
    cross entropy of labels that are wrong with probability e: -(1 - e) log sigma(beta h) - e log sigma(-beta h).
    """
    scaled = beta * (chosen_logratio - rejected_logratio)
    return -(1 - label_smoothing) * jax.nn.log_sigmoid(scaled) - label_smoothing * jax.nn.log_sigmoid(-scaled)


def pair_sums(values: jax.Array, mask: jax.Array, segment_ids: jax.Array) -> Pair:
    """Sums of `values` over the tokens of the two answers.

    Args:
        values: float `[N, W]`; masked entries may hold anything.
        mask: bool `[N, W]`, the answers' tokens.
        segment_ids: int `[N, W]`; 0 is padding.
    """
    pair_ids = (segment_ids + 1) // 2
    is_chosen = segment_ids % 2 == 1
    return Pair(
        chosen=segment_sum(values, mask & is_chosen, pair_ids),
        rejected=segment_sum(values, mask & ~is_chosen, pair_ids),
    )


def first_of_pair(positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """bool `[N, W]`: one token of each pair, to sum over pairs what is constant over their tokens.

    Args:
        positions: int `[N, W]`, from 0 in each segment.
    """
    return jnp.asarray(positions == 0) & (segment_ids % 2 == 1)

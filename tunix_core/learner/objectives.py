"""What a step minimises, for one micro-batch of packed windows.

An objective maps parameters and windows to the micro-batch's part of the loss (a sum over its policy
tokens divided by the batch's one global denominator, so parts of micro-batches and devices just add)
and to sums for the step's metrics, which add too.

Shapes: M windows of a micro-batch, W tokens. Entry t of a batch array describes token t itself, which
the hidden state of token t - 1 predicts; the first token of a segment is never a policy token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tunix_core.config import AlgorithmConfig, ModelConfig
from tunix_core.models.decoder import Params, hidden_states, token_logprobs
from tunix_core.rl import aggregation, corrections, diagnostics, kl, losses

Array = Any
"""On the host, on the device, or abstract."""


class Batch(NamedTuple):
    """N packed windows of W tokens."""

    tokens: Array  # int32 [N, W]
    positions: Array  # int32 [N, W], restarting in each segment
    segment_ids: Array  # int32 [N, W], 0 is padding
    loss_mask: Array  # bool [N, W], the policy tokens
    behavior_logprobs: Array  # float32 [N, W]
    advantages: Array  # float32 [N, W]
    temperature: Array  # float32 [N, W]


Sums = dict[str, jax.Array]
"""Scalars that add over micro-batches and devices, except those named `max_…`, whose maximum is taken."""

Objective = Callable[[Params, Params, Batch, jax.Array], tuple[jax.Array, Sums]]
"""(parameters, reference parameters, windows, denominator) -> (part of the loss, sums)."""


def predictions(params: Params, config: ModelConfig, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Log probability of each token given those before it in its segment, and that distribution's entropy.

    Returns:
        logprobs, entropy: `[M, W]`; at the row's temperature where `loss_mask` is true, at 1 elsewhere; entry 0
            of a window is meaningless, as is every segment's first.
    """
    hidden = hidden_states(params, config, batch.tokens, batch.positions, batch.segment_ids)
    # The state before each token; the last state predicts nothing inside the window.
    before = jnp.concatenate([hidden[:, :1], hidden[:, :-1]], axis=1)
    # An empty window is all zeros, its temperature too: 0 times infinity would come back in the gradient.
    temperature = aggregation.where_policy(batch.loss_mask, batch.temperature, 1.0)
    return token_logprobs(params, config, before, batch.tokens, temperature)


def policy_objective(model: ModelConfig, algorithm: AlgorithmConfig) -> Objective:
    """Decoupled PPO with truncated importance weights, and a KL leash to the reference.

    With one update per batch the proximal policy is the current one, so its log probabilities are
    `stop_gradient(current)` and cost no pass of their own.
    """

    def objective(params: Params, reference: Params, batch: Batch, denominator: jax.Array) -> tuple[jax.Array, Sums]:
        mask = jnp.asarray(batch.loss_mask)
        # Masked tokens may hold anything: neutral values on the way in, none of them on the way out.
        advantages = aggregation.where_policy(mask, batch.advantages)
        logprobs, entropy = predictions(params, model, batch)
        reference_logprobs = jax.lax.stop_gradient(predictions(reference, model, batch)[0])
        proximal = jax.lax.stop_gradient(logprobs)
        behavior = aggregation.where_policy(mask, batch.behavior_logprobs, proximal)

        correction = corrections.truncated_importance_weights(proximal, behavior, algorithm.importance_truncation)
        loss, clipped = losses.decoupled_ppo(
            logprobs, proximal, advantages, correction, algorithm.clip_low, algorithm.clip_high
        )
        # Both gradients of the estimator: of the ratio and of k3.
        leash = correction * kl.unbiased_k3(logprobs, proximal, reference_logprobs)
        part = aggregation.masked_sum(loss + algorithm.kl_coefficient * leash, mask) / denominator

        add = lambda values: aggregation.masked_sum(jax.lax.stop_gradient(values), mask)  # noqa: E731
        off_policy = diagnostics.moments(proximal, behavior, clipped, mask, truncation=algorithm.importance_truncation)
        sums = {
            **off_policy._asdict(),
            "policy_loss": add(loss),
            "kl_reference": add(kl.k3(proximal, reference_logprobs)),
            "entropy": add(entropy),
            "max_logprob_gap": jnp.where(mask, jnp.abs(proximal - behavior), 0).max(),
        }
        return part, sums

    return objective


def supervised_objective(model: ModelConfig) -> Objective:
    """Cross entropy of the policy tokens."""

    def objective(params: Params, reference: Params, batch: Batch, denominator: jax.Array) -> tuple[jax.Array, Sums]:
        del reference  # no leash: this makes the policy that later is the reference
        mask = jnp.asarray(batch.loss_mask)
        logprobs, entropy = predictions(params, model, batch)
        part = -aggregation.masked_sum(logprobs, mask) / denominator
        sums = {
            "policy_tokens": mask.sum(dtype=jnp.float32),
            "entropy": aggregation.masked_sum(jax.lax.stop_gradient(entropy), mask),
        }
        return part, sums

    return objective


def finalize(sums: Sums) -> Sums:
    """Means over the batch's policy tokens; off-policy figures where the objective has their moments."""
    sums = dict(sums)
    num_tokens = sums["policy_tokens"]
    figures: Sums = {"policy_tokens": num_tokens}
    if set(diagnostics.Moments._fields) <= set(sums):
        total = diagnostics.Moments(**{name: sums.pop(name) for name in diagnostics.Moments._fields})
        figures |= diagnostics.finalize(total)._asdict()
    divisor = jnp.maximum(num_tokens, 1)
    means = {name: value if name.startswith("max_") else value / divisor for name, value in sums.items()}
    return {**means, **figures}

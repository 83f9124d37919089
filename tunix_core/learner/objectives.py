"""What a step minimises, for one micro-batch of packed windows.

An objective maps parameters and windows to the micro-batch's part of the loss (a sum over its policy
tokens divided by the update's one global denominator, so parts of micro-batches and devices just add)
and to sums for the step's metrics, which add too.

Shapes: M windows of a micro-batch, W tokens. Entry t of a batch array describes token t itself, which
the hidden state of token t - 1 predicts; the first token of a segment is never a policy token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tunix_core.config import AlgorithmConfig, ModelConfig, PreferencesConfig
from tunix_core.data.packing import NUM_SAMPLERS
from tunix_core.distributed.parallel import ALONE, Parallel
from tunix_core.learner import value_head
from tunix_core.models.decoder import embed, run_blocks, token_logprobs
from tunix_core.models.parameters import Params, adapted, final_norm
from tunix_core.rl import aggregation, corrections, diagnostics, kl, losses, preferences, returns

SAMPLER_GAP, SAMPLER_TOKENS = "sampler_gap_", "sampler_tokens_"
"""Beginnings of the names of figures that each number of an actor has."""

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
    equal_version: Array
    """uint8 [N, W]: not 0 for policy tokens sampled with the very weights that the step starts from, by the actor of that number."""
    rewards: Array | None = None  # float32 [N, W], with a value head: at the last policy token of each turn


Sums = dict[str, jax.Array]
"""Scalars that add over micro-batches and devices, except those named `max_…`, whose maximum is taken."""


class Predictions(NamedTuple):
    """Of one policy, about the tokens of some windows; entry t is predicted by the state of token t - 1.

    Entry 0 of a window is meaningless, as is every segment's first.
    """

    logprobs: Array  # float32 [M, W], at the row's temperature where `loss_mask` is true, at 1 elsewhere
    entropy: Array  # float32 [M, W], of that distribution
    values: Array | None = None  # float32 [M, W], with a value head: of the state before each token


class Given(NamedTuple):
    """What an update takes as constants."""

    reference: Predictions | None
    start: Predictions | None
    """By the weights at the start of the batch; None: the update's own weights are those."""


TokenLoss = Callable[[Predictions, Batch, Given, jax.Array], tuple[jax.Array, Sums]]
"""(of the weights in training, windows, constants, denominator) -> part of the loss, and sums."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """What an update minimises: predictions of the weights in training, and a loss of each token's.

    They are apart because a mesh comes between them: the reference's are made for a whole batch before its first update,
    and stages make them far from where the windows enter.
    """

    model: ModelConfig
    token_loss: TokenLoss
    has_reference: bool
    has_values: bool = False

    @property
    def reads_reference(self) -> bool:
        """Itself, or as what adapters lie on."""
        return self.has_reference or self.model.lora_rank > 0

    def policy(self, trained: Params, reference: Params | None) -> Params:
        """The whole weights: those in training, or adapters on the reference."""
        return adapted(self.model, trained, reference)

    def read(self, model: ModelConfig, params: Params, x: jax.Array, batch: Batch, parallel: Parallel) -> Predictions:
        """Predictions from the last layer's output `[M, W / tensor, D]`.

        Args:
            model: the objective's own, or the reference's, whose parameters have no value head.
        """
        states = final_norm(model, params)(x)
        # An empty window is all zeros, its temperature too: 0 times infinity would come back in the gradient.
        temperature = aggregation.where_policy(batch.loss_mask, batch.temperature, 1.0)
        before = _before(parallel.enter(states))
        logprobs, entropy = token_logprobs(params, model, before, batch.tokens, temperature, parallel)
        if not (self.has_values and value_head.NAME in params):
            return Predictions(logprobs, entropy)
        return Predictions(logprobs, entropy, _before(parallel.whole(value_head.values(params, states))))

    def predict(self, model: ModelConfig, params: Params, batch: Batch) -> Predictions:
        """A whole forward pass, on a device alone."""
        x = embed(params, model, batch.tokens)
        x = run_blocks(params["blocks"], model, x, batch.positions, batch.segment_ids)
        return self.read(model, params, x, batch, ALONE)

    def __call__(
        self, trained: Params, reference: Params, batch: Batch, denominator: jax.Array, start: Predictions | None = None
    ) -> tuple[jax.Array, Sums]:
        """Part of the loss of one micro-batch, and sums, on a device alone.

        Args:
            trained: whole weights or adapters, with the value head if there is one.
            reference: parameters of the KL reference; with adapters, the base they lie on.
            start: of the weights at the start of the batch; None: `trained` are those.
        """
        anchor = self.predict(self.model.base(), reference, batch) if self.has_reference else None
        current = self.predict(self.model, self.policy(trained, reference), batch)
        return self.token_loss(current, batch, jax.lax.stop_gradient(Given(anchor, start)), denominator)


def _before(x: jax.Array) -> jax.Array:
    """`[M, W, …]` of the token before each; the last one's predicts nothing inside the window."""
    return jnp.concatenate([x[:, :1], x[:, :-1]], axis=1)


class _Tokens(NamedTuple):
    """Of one micro-batch, `[M, W]`; neutral where the policy did not speak."""

    logprobs: jax.Array
    proximal: jax.Array
    behavior: jax.Array
    reference: jax.Array
    advantages: jax.Array
    mask: jax.Array
    segment_ids: jax.Array


def _correction(algorithm: AlgorithmConfig, at: _Tokens) -> jax.Array:
    band = (algorithm.mask_low, algorithm.mask_high)
    segments = (at.mask, at.segment_ids)
    match algorithm.correction:
        case "truncate":
            return corrections.truncated_importance_weights(at.proximal, at.behavior, algorithm.importance_truncation)
        case "truncate_sequence":
            return corrections.truncated_sequence_weights(
                at.proximal, at.behavior, *segments, algorithm.importance_truncation
            )
        case "mask":
            return corrections.masked_importance_weights(at.proximal, at.behavior, *band)
        case "mask_sequence":
            return corrections.geometric_sequence_mask(at.proximal, at.behavior, *segments, *band)
        case "none":
            return jnp.ones_like(at.proximal)


def _policy_loss(algorithm: AlgorithmConfig, at: _Tokens, correction: jax.Array) -> tuple[jax.Array, jax.Array]:
    clip = (algorithm.clip_low, algorithm.clip_high)
    dual_clip = algorithm.dual_clip or None
    match algorithm.loss:
        case "decoupled_ppo":
            return losses.decoupled_ppo(at.logprobs, at.proximal, at.advantages, correction, *clip, dual_clip)
        case "ppo":
            return losses.decoupled_ppo(at.logprobs, at.behavior, at.advantages, correction, *clip, dual_clip)
        case "gspo":
            return losses.gspo(at.logprobs, at.behavior, at.advantages, at.mask, at.segment_ids, *clip)
        case "cispo":
            return losses.cispo(at.logprobs, at.behavior, at.advantages, *clip)
        case "policy_gradient":
            loss = losses.importance_weighted(at.logprobs, at.advantages, correction)
            return loss, jnp.zeros_like(at.mask)
        case "vtrace":  # the weight is in the advantage
            return losses.importance_weighted(at.logprobs, at.advantages, correction), jnp.zeros_like(at.mask)


def _divergence(algorithm: AlgorithmConfig, at: _Tokens) -> jax.Array:
    """KL to the reference per token."""
    if algorithm.kl_estimator == "unbiased":
        return kl.unbiased_k3(at.logprobs, at.proximal, at.reference)
    return {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}[algorithm.kl_estimator](at.logprobs, at.reference)


class _Value(NamedTuple):
    """Of the states before the tokens of one micro-batch, `[M, W]`."""

    current: Array
    at_start: Array
    rewards: Array


def _credited(algorithm: AlgorithmConfig, at: _Tokens, value: _Value | None) -> tuple[_Tokens, jax.Array | None]:
    """With the advantages that count in the loss; and what the value head is fitted to."""
    cost = jnp.zeros_like(at.proximal)
    if algorithm.kl_in == "reward":
        # A reward is settled before the first update.
        cost = algorithm.kl_coefficient * jax.lax.stop_gradient(
            _divergence(algorithm, at._replace(logprobs=at.proximal))
        )
    if value is None:
        return at._replace(advantages=at.advantages - cost), None
    rewards = aggregation.where_policy(at.mask, value.rewards) - cost
    where = (rewards, value.at_start)
    if algorithm.loss == "vtrace":
        found = returns.vtrace(
            *where,
            at.proximal - at.behavior,
            at.mask,
            at.segment_ids,
            discount=algorithm.discount,
            truncation=algorithm.importance_truncation,
            trace_decay=algorithm.trace_decay,
        )
    else:
        found = returns.generalized_advantages(
            *where, at.mask, at.segment_ids, discount=algorithm.discount, trace_decay=algorithm.trace_decay
        )
    return at._replace(advantages=found.advantages), found.targets


def policy_objective(model: ModelConfig, algorithm: AlgorithmConfig) -> Objective:
    """The policy loss that `algorithm` describes, with a KL leash to the reference and the value head's loss if any.

    With one update per batch the proximal policy is the current one, so its log probabilities are
    `stop_gradient(current)` and cost no pass of their own; so are the values that advantages come from.
    """

    def token_loss(found: Predictions, batch: Batch, given: Given, denominator: jax.Array) -> tuple[jax.Array, Sums]:
        assert given.reference is not None
        mask = jnp.asarray(batch.loss_mask)
        logprobs = found.logprobs
        current = jax.lax.stop_gradient(logprobs)
        proximal = current if given.start is None else given.start.logprobs
        # Masked tokens may hold anything: neutral values on the way in, none of them on the way out.
        at = _Tokens(
            logprobs=logprobs,
            proximal=proximal,
            behavior=aggregation.where_policy(mask, batch.behavior_logprobs, proximal),
            reference=given.reference.logprobs,
            advantages=aggregation.where_policy(mask, batch.advantages),
            mask=mask,
            segment_ids=jnp.asarray(batch.segment_ids),
        )
        # The plain policy gradient knows no proximal policy: its weight is current / behavior in every update.
        plain = algorithm.loss == "policy_gradient"
        correction = _correction(algorithm, at._replace(proximal=current) if plain else at)
        value = None
        if found.values is not None:
            at_start = jax.lax.stop_gradient(found.values) if given.start is None else given.start.values
            value = _Value(found.values, at_start, batch.rewards)
        at, targets = _credited(algorithm, at, value)
        loss, clipped = _policy_loss(algorithm, at, correction)
        sums = _token_sums(algorithm, at, loss, clipped, found.entropy, jnp.asarray(batch.equal_version))
        total = loss
        if algorithm.kl_in == "loss":
            # The tokens are the behavior policy's: the leash is corrected as the loss is.
            total = total + algorithm.kl_coefficient * correction * _divergence(algorithm, at)
        if value is not None and targets is not None:
            error = losses.clipped_value_loss(value.current, value.at_start, targets, algorithm.value_clip or None)
            total = total + algorithm.value_coefficient * error
            figures = {
                "value_loss": error,
                "value_mean": value.at_start,
                "return_mean": targets,
                "return_square": targets**2,
                "value_error_square": (targets - value.at_start) ** 2,
            }
            sums |= {name: aggregation.masked_sum(jax.lax.stop_gradient(x), mask) for name, x in figures.items()}
        weights = aggregation.token_weights(algorithm.aggregation, mask, at.segment_ids)
        return aggregation.masked_sum(weights * total, mask) / denominator, sums

    return Objective(model, token_loss, has_reference=True, has_values=algorithm.has_value_head)


def _token_sums(
    algorithm: AlgorithmConfig, at: _Tokens, loss: jax.Array, clipped: jax.Array, entropy: jax.Array, sampler: jax.Array
) -> Sums:
    """
    Args:
        sampler: uint8 `[M, W]`, not 0 for the policy tokens whose version the step starts from.
    """
    at, loss, entropy = jax.lax.stop_gradient((at, loss, entropy))
    off_policy = diagnostics.moments(
        at.proximal, at.behavior, clipped, at.mask, truncation=algorithm.importance_truncation
    )
    # Across versions the gap is the policy's own progress; within one it is what sampler and learner compute apart.
    gap = jnp.abs(at.proximal - at.behavior)
    same = sampler > 0
    of_samplers = {}
    for number in range(1, NUM_SAMPLERS + 1):
        own = sampler == number
        of_samplers[f"{SAMPLER_GAP}{number}"] = aggregation.masked_sum(gap, own)
        of_samplers[f"{SAMPLER_TOKENS}{number}"] = own.sum(dtype=jnp.float32)
    return {
        **of_samplers,
        **off_policy._asdict(),
        "policy_loss": aggregation.masked_sum(loss, at.mask),
        "kl_reference": aggregation.masked_sum(kl.k3(at.logprobs, at.reference), at.mask),
        "entropy": aggregation.masked_sum(entropy, at.mask),
        "kl_proximal": aggregation.masked_sum(kl.k3(at.proximal, at.logprobs), at.mask),
        "max_logprob_gap": jnp.where(at.mask, gap, 0).max(),
        "equal_version_gap": aggregation.masked_sum(gap, same),
        "equal_version_tokens": same.sum(dtype=jnp.float32),
        "max_logprob_gap_equal_version": jnp.where(same, gap, 0).max(),
    }


def supervised_objective(model: ModelConfig) -> Objective:
    """Cross entropy of the policy tokens."""

    def token_loss(found: Predictions, batch: Batch, given: Given, denominator: jax.Array) -> tuple[jax.Array, Sums]:
        del given
        mask = jnp.asarray(batch.loss_mask)
        part = -aggregation.masked_sum(found.logprobs, mask) / denominator
        sums = {
            "policy_tokens": mask.sum(dtype=jnp.float32),
            "entropy": aggregation.masked_sum(jax.lax.stop_gradient(found.entropy), mask),
        }
        return part, sums

    return Objective(model, token_loss, has_reference=False)


def preference_objective(model: ModelConfig, options: PreferencesConfig) -> Objective:
    """Direct preference optimisation of packed pairs (see `rl.preferences`), against the reference.

    The denominator is the update's number of pairs. With fresh adapters the reference is what they start from; with
    whole weights pass a copy of the weights at the start.
    """

    def token_loss(found: Predictions, batch: Batch, given: Given, denominator: jax.Array) -> tuple[jax.Array, Sums]:
        assert given.reference is not None
        mask, segment_ids = jnp.asarray(batch.loss_mask), jnp.asarray(batch.segment_ids)
        ratios = preferences.pair_sums(found.logprobs - given.reference.logprobs, mask, segment_ids)
        loss = preferences.dpo(*ratios, options.beta, options.label_smoothing)
        once = preferences.first_of_pair(batch.positions, segment_ids)
        margin = jax.lax.stop_gradient(options.beta * (ratios.chosen - ratios.rejected))
        answers = preferences.pair_sums(jax.lax.stop_gradient(found.logprobs), mask, segment_ids)
        add = lambda values: aggregation.masked_sum(values, once)  # noqa: E731
        sums = {
            "policy_tokens": mask.sum(dtype=jnp.float32),
            "pairs": once.sum(dtype=jnp.float32),
            "pair_margin": add(margin),
            # A tie is no success: at the start every pair is one, up to rounding.
            "pair_accuracy": add((margin > 0).astype(jnp.float32)),
            "pair_chosen_logprob": add(answers.chosen),
            "pair_rejected_logprob": add(answers.rejected),
        }
        return aggregation.masked_sum(loss, once) / denominator, sums

    return Objective(model, token_loss, has_reference=True)


def finalize(sums: Sums) -> Sums:
    """Means over the batch's policy tokens, or pairs; off-policy figures where the objective has their moments."""
    sums = dict(sums)
    num_tokens = sums["policy_tokens"]
    figures: Sums = {"policy_tokens": num_tokens}
    if "pairs" in sums:
        num_pairs = sums.pop("pairs")
        of_pairs = [name for name in sums if name.startswith("pair_")]
        figures |= {"pairs": num_pairs, **{name: sums.pop(name) / jnp.maximum(num_pairs, 1) for name in of_pairs}}
    if set(diagnostics.Moments._fields) <= set(sums):
        total = diagnostics.Moments(**{name: sums.pop(name) for name in diagnostics.Moments._fields})
        figures |= diagnostics.finalize(total)._asdict()
    if "equal_version_gap" in sums:
        num_same = sums.pop("equal_version_tokens")
        gap = sums.pop("equal_version_gap") / jnp.maximum(num_same, 1)
        figures |= {"equal_version_tokens": num_same, "logprob_gap_equal_version": gap}
        for number in range(1, NUM_SAMPLERS + 1):
            num_own = sums.pop(f"{SAMPLER_TOKENS}{number}")
            figures[f"{SAMPLER_TOKENS}{number}"] = num_own
            figures[f"{SAMPLER_GAP}{number}"] = sums.pop(f"{SAMPLER_GAP}{number}") / jnp.maximum(num_own, 1)
    divisor = jnp.maximum(num_tokens, 1)
    means = {name: value if name.startswith("max_") else value / divisor for name, value in sums.items()}
    if "return_square" in means:
        figures["explained_variance"] = _explained_variance(means)
    return {**means, **figures}


def _explained_variance(means: Sums) -> jax.Array:
    """Takes the squares out of `means`: 1 - Var(return - value) / Var(return); 0 where returns do not vary."""
    of_returns = means.pop("return_square") - means["return_mean"] ** 2
    of_errors = means.pop("value_error_square") - (means["return_mean"] - means["value_mean"]) ** 2
    return jnp.where(of_returns > 1e-8, 1 - of_errors / jnp.maximum(of_returns, 1e-8), 0.0)

"""What each device of the mesh runs under `shard_map`: the optimizer updates of one batch.

Parameters come as the device's parts and are cast to varying before the first micro-batch, so that gradients stay
per device until the one explicit sum; behind it the global norm, the guard and the optimizer act on the parts.

A batch always has the shape that was compiled; how many of its micro-batches hold anything is data, the bound
of the loops over them. So one executable serves every batch without paying for its padding.

With K updates per batch (`learner.updates_per_batch`) the micro-batches are dealt to them in turn. One forward
pass gives the log probabilities by the weights at the start of the batch, the proximal policy of all K; at
K = 1 those are the current ones and the pass is not compiled.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from tunix_core.distributed import schedules
from tunix_core.distributed.parallel import LOSS_AXES, Parallel, zeros_of
from tunix_core.distributed.schedules import Pipeline
from tunix_core.learner.objectives import Given, Objective, Predictions, Sums, finalize
from tunix_core.model_config import ModelConfig
from tunix_core.models.decoder import embed, run_blocks
from tunix_core.models.parameters import Params
from tunix_core.models.partitioning import as_differentiated


class TrainState(NamedTuple):
    """Everything that a batch changes."""

    params: Params
    opt_state: Any
    step: Any  # int32 []


class PlacedBatch(NamedTuple):
    """A batch on the mesh, in the compiled shape."""

    windows: Any
    """A `Batch`."""
    num_microbatches: Any
    """int32 [], per device and the same on all: the leading ones that hold anything."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a batch goes through; static."""

    objective: Objective
    optimizer: optax.GradientTransformation
    parallel: Parallel
    specs: Any
    """Of what is trained: a tree of `PartitionSpec`."""
    microbatch: int
    """Windows of one, per device."""
    num_updates: int = 1
    """K"""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"

    def part(self, tree: Any, i: Any) -> Any:
        """The i-th of this device's micro-batches."""
        take = lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, i * self.microbatch, self.microbatch)  # noqa: E731
        return jax.tree.map(take, tree)


def _combine(first: Sums, second: Sums) -> Sums:
    return {k: jnp.maximum(first[k], second[k]) if k.startswith("max_") else first[k] + second[k] for k in first}


def over_devices(parallel: Parallel, sums: Sums) -> Sums:
    """The sums of all devices."""
    return {
        k: parallel.largest(v, LOSS_AXES) if k.startswith("max_") else parallel.total(v, LOSS_AXES)
        for k, v in sums.items()
    }


# ---- forward only ---------------------------------------------------------------------------------


def predict_all(plan: Plan, model: ModelConfig, params: Params, batch: PlacedBatch) -> Predictions:
    """By `params` (varying), about this device's windows: `[n, W]`, zeros in those that hold nothing.

    With stages, only the last one's devices have them.
    """
    windows = functools.partial(plan.part, batch.windows)

    def finish(params: Params, x: jax.Array, i: Any) -> Predictions:
        return plan.objective.read(model, params, x, windows(i), plan.parallel)

    pipeline = _pipeline(plan, model, windows, lambda params: params, finish)

    def write(whole: Predictions, own: Predictions, i: Any) -> Predictions:
        update = lambda all_, part: jax.lax.dynamic_update_slice_in_dim(all_, part, i * plan.microbatch, 0)  # noqa: E731
        return jax.tree.map(update, whole, own)

    own = jax.eval_shape(lambda: pipeline.finish(params, pipeline.feed(params, 0), 0))
    whole = zeros_of(own, num_rows=batch.windows.tokens.shape[0])
    return schedules.sweep(pipeline, params, batch.num_microbatches, whole, write)


def _pipeline(plan: Plan, model: ModelConfig, windows: Any, policy: Any, finish: Any) -> Pipeline:
    """The decoder between its ends.

    Args:
        windows: i -> micro-batch.
        policy: parameters -> those of the decoder.
    """

    def feed(params: Params, i: Any) -> jax.Array:
        return embed(policy(params), model, windows(i).tokens, plan.parallel)

    def run(params: Params, x: jax.Array, i: Any) -> jax.Array:
        own = windows(i)
        return run_blocks(policy(params)["blocks"], model, x, own.positions, own.segment_ids, plan.parallel)

    return Pipeline(plan.parallel, feed, run, finish)


# ---- updates --------------------------------------------------------------------------------------


def _accumulate(
    plan: Plan,
    params: Params,
    reference: Params | None,
    batch: PlacedBatch,
    given: Given,
    denominator: jax.Array,
    k: Any,
) -> tuple[jax.Array, Params, Sums]:
    """Loss, gradient and sums of this device's windows in update k, micro-batch by micro-batch; all per device.

    Update k takes micro-batches k, k + K, k + 2 K, …
    """
    objective = plan.objective

    def windows(j: Any) -> Any:
        return plan.part(batch.windows, k + j * plan.num_updates)

    def policy(params: Params) -> Params:
        return objective.policy(params, reference)

    def finish(params: Params, x: jax.Array, j: Any) -> tuple[jax.Array, Sums]:
        own = windows(j)
        found = objective.read(objective.model, policy(params), x, own, plan.parallel)
        constants = plan.part(given, k + j * plan.num_updates)
        return objective.token_loss(found, own, constants, denominator)

    pipeline = _pipeline(plan, objective.model, windows, policy, finish)
    count = jax.lax.div(batch.num_microbatches - k + (plan.num_updates - 1), plan.num_updates)
    most = -(-(batch.windows.tokens.shape[0] // plan.microbatch) // plan.num_updates)
    return schedules.accumulate(pipeline, params, count, combine=_combine, schedule=plan.schedule, max_count=most)


def _summed(plan: Plan, gradient: Params) -> Params:
    """Over the devices that hold the same parameter."""

    def total(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        return plan.parallel.total(leaf, set(plan.parallel.active()) - set(spec))

    return jax.tree.map(total, gradient, plan.specs)


def _global_norm(plan: Plan, gradient: Params) -> jax.Array:
    """Of the whole gradient, each parameter counted once."""
    by_axes: dict[tuple[str, ...], jax.Array] = {}
    for leaf, spec in zip(jax.tree.leaves(gradient), jax.tree.leaves(plan.specs), strict=True):
        axes = plan.parallel.active([axis for axis in spec if axis])
        by_axes[axes] = by_axes.get(axes, jnp.zeros(())) + jnp.square(leaf).sum()
    return jnp.sqrt(sum((plan.parallel.total(part, axes) for axes, part in by_axes.items()), jnp.zeros(())))


class _Outcome(NamedTuple):
    """Of one update, or `[K]` of all."""

    loss: jax.Array
    gradient_norm: jax.Array
    finite: jax.Array
    sums: Sums
    """Per device."""


def _advance(
    plan: Plan,
    state: TrainState,
    reference: Params | None,
    batch: PlacedBatch,
    given: Given,
    denominator: jax.Array,
    k: Any,
) -> tuple[TrainState, _Outcome]:
    """Update k; parameters and optimizer state stay as they are where it is not finite, or has no policy token."""
    divisor = jnp.maximum(denominator, 1)
    # A micro-batch's gradient is in the compute type, as its products are; their sum is float32.
    params = as_differentiated(plan.parallel.vary(state.params), plan.objective.model.compute_dtype)
    loss, gradient, sums = _accumulate(plan, params, reference, batch, given, divisor, k)
    loss = plan.parallel.total(loss, LOSS_AXES)
    gradient = _summed(plan, gradient)
    norm = _global_norm(plan, gradient)
    updates, opt_state = optax.with_extra_args_support(plan.optimizer).update(
        gradient, state.opt_state, state.params, global_norm=norm
    )
    params = optax.apply_updates(state.params, updates)
    # A sum of squares is finite only where every entry is.
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    keep = functools.partial(jnp.where, finite & (denominator > 0))
    kept = state._replace(
        params=jax.tree.map(keep, params, state.params), opt_state=jax.tree.map(keep, opt_state, state.opt_state)
    )
    return kept, _Outcome(loss, norm, finite, sums)


def step(
    plan: Plan, state: TrainState, reference: Params | None, batch: PlacedBatch, denominator: jax.Array
) -> tuple[TrainState, Sums]:
    """The K updates of a batch."""
    objective, reference = plan.objective, plan.parallel.vary(reference)
    anchor = predict_all(plan, objective.model.base(), reference, batch) if objective.has_reference else None
    if plan.num_updates == 1:
        state, outcome = _advance(plan, state, reference, batch, Given(anchor, None), denominator[0], 0)
        return _counted(state), _metrics(plan, outcome.loss, outcome.gradient_norm, ~outcome.finite, outcome.sums)
    start = predict_all(plan, objective.model, objective.policy(plan.parallel.vary(state.params), reference), batch)

    def body(state: TrainState, each: tuple[jax.Array, jax.Array]) -> tuple[TrainState, _Outcome]:
        k, own = each
        return _advance(plan, state, reference, batch, Given(anchor, start), own, k)

    numbers = jnp.arange(plan.num_updates, dtype=jnp.int32)
    state, outcomes = jax.lax.scan(body, state, (numbers, denominator))
    num_acting = jnp.maximum((denominator > 0).sum(), 1)
    sums = {k: v.max(axis=0) if k.startswith("max_") else v.sum(axis=0) for k, v in outcomes.sums.items()}
    loss = (outcomes.loss * denominator).sum() / jnp.maximum(denominator.sum(), 1)
    return _counted(state), _metrics(plan, loss, outcomes.gradient_norm.sum() / num_acting, ~outcomes.finite, sums)


def held_out(plan: Plan, params: Params, reference: Params | None, batch: PlacedBatch) -> Sums:
    """The objective's sums over a batch at denominator 1, `loss` among them; nothing changes."""
    objective = plan.objective
    params, reference = plan.parallel.vary((params, reference))
    anchor = predict_all(plan, objective.model.base(), reference, batch) if objective.has_reference else None
    found = predict_all(plan, objective.model, objective.policy(params, reference), batch)
    loss, sums = objective.token_loss(found, batch.windows, Given(anchor, None), jnp.float32(1))
    sums = {"loss": loss, **sums}
    if plan.parallel.stage > 1:
        on_last = plan.parallel.index("stage") == plan.parallel.stage - 1
        sums = {name: jnp.where(on_last, value, 0) for name, value in sums.items()}
    return over_devices(plan.parallel, sums)


def _counted(state: TrainState) -> TrainState:
    """The clock counts batches."""
    return state._replace(step=state.step + 1)


def _metrics(plan: Plan, loss: jax.Array, norm: jax.Array, skipped: jax.Array, sums: Sums) -> Sums:
    return {
        "loss": loss,
        "gradient_norm": norm,
        "nonfinite": skipped.sum(dtype=jnp.int32),
        **finalize(over_devices(plan.parallel, sums)),
    }

"""A batch's optimizer updates as one compiled `shard_map` over the mesh; a single device is the trivial mesh.

The whole step is manual with `check_vma=True`: parameters are replicated and cast to varying before
the micro-batch scan, so that their gradients stay per device until the one explicit sum. (Without the
check, the loss was exact and the gradients silently wrong.)

A batch always has the shape that was compiled, ahead of time; how many of its micro-batches hold
anything is data, the bound of the loop over them. So one executable serves every batch without
paying for its padding, and nothing compiles after warm-up.

With K updates per batch (`learner.updates_per_batch`) the micro-batches are dealt to them in turn. One forward
pass gives the log probabilities by the weights at the start of the batch, the proximal policy of all K; at
K = 1 those are the current ones and the pass is not compiled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from tunix_core.config import OptimizerConfig, RunConfig
from tunix_core.distributed.mesh import REPLICATED, WINDOW_AXES, WINDOWS, placed
from tunix_core.errors import ConfigError
from tunix_core.learner import value_head
from tunix_core.learner.objectives import (
    Batch,
    Objective,
    Sums,
    finalize,
    policy_objective,
    start_of_batch,
    supervised_objective,
)
from tunix_core.model_config import ModelConfig
from tunix_core.models.parameters import Params, abstract_parameters, trained_parameters

StartOfBatch = Callable[[Params, Params, Batch], Any]
"""(parameters at the start of the batch, reference parameters, windows) -> what the objective takes as `start`."""


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


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW behind a clip of the global norm, with linear warm-up."""
    rate: Any = config.learning_rate
    if config.warmup_steps:
        rate = optax.linear_schedule(
            config.learning_rate / config.warmup_steps, config.learning_rate, config.warmup_steps
        )
    return optax.chain(
        optax.clip_by_global_norm(config.gradient_clip_norm),
        optax.adamw(rate, b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay),
    )


def _combine(first: Sums, second: Sums) -> Sums:
    return {k: jnp.maximum(first[k], second[k]) if k.startswith("max_") else first[k] + second[k] for k in first}


def over_devices(sums: Sums) -> Sums:
    """The sums of all devices, under `shard_map`."""
    return {
        k: jax.lax.pmax(v, WINDOW_AXES) if k.startswith("max_") else jax.lax.psum(v, WINDOW_AXES)
        for k, v in sums.items()
    }


def _varying(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, WINDOW_AXES, to="varying"), tree)


class _Plan(NamedTuple):
    """What a batch goes through; static."""

    objective: Objective
    optimizer: optax.GradientTransformation
    microbatch: int
    """Windows of one, per device."""
    num_updates: int
    """K"""
    at_start: StartOfBatch | None
    """Needed where K is above 1."""


def _microbatch(plan: _Plan, tree: Any, i: Any) -> Any:
    """The i-th of this device's micro-batches."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, i * plan.microbatch, plan.microbatch), tree)


def _zeros(shapes: Any) -> Any:
    return _varying(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))


def _at_the_start(plan: _Plan, params: Params, reference: Params, batch: PlacedBatch) -> Any:
    """What `plan.at_start` gives of this device's windows, `[n, W]`; zeros in those that hold nothing."""
    assert plan.at_start is not None, "updates after the first one need it"
    evaluate = functools.partial(plan.at_start, params, reference)

    def body(i: jax.Array, whole: Any) -> Any:
        part = evaluate(_microbatch(plan, batch.windows, i))
        return jax.tree.map(
            lambda all_of_it, own: jax.lax.dynamic_update_slice_in_dim(all_of_it, own, i * plan.microbatch, 0),
            whole,
            part,
        )

    zeros = _zeros(jax.eval_shape(evaluate, batch.windows))
    return jax.lax.fori_loop(0, batch.num_microbatches, body, zeros)


def _accumulate(
    plan: _Plan, params: Params, reference: Params, batch: PlacedBatch, start: Any, denominator: jax.Array, k: Any
) -> tuple[jax.Array, Params, Sums]:
    """Loss, gradient and sums of this device's windows in update k, micro-batch by micro-batch; all per device.

    Update k takes micro-batches k, k + K, k + 2 K, …
    """
    value_and_grad = jax.value_and_grad(plan.objective, has_aux=True)

    def evaluate(i: Any) -> tuple[jax.Array, Params, Sums]:
        windows, own = _microbatch(plan, (batch.windows, start), i)
        (loss, sums), gradient = value_and_grad(params, reference, windows, denominator, own)
        return loss, gradient, sums

    def body(j: jax.Array, total: tuple[jax.Array, Params, Sums]) -> tuple[jax.Array, Params, Sums]:
        loss, gradient, sums = total
        more_loss, more_gradient, more_sums = evaluate(k + j * plan.num_updates)
        return loss + more_loss, jax.tree.map(jnp.add, gradient, more_gradient), _combine(sums, more_sums)

    count = jax.lax.div(batch.num_microbatches - k + (plan.num_updates - 1), plan.num_updates)
    return jax.lax.fori_loop(0, count, body, _zeros(jax.eval_shape(evaluate, 0)))


class _Outcome(NamedTuple):
    """Of one update, or `[K]` of all."""

    loss: jax.Array
    gradient_norm: jax.Array
    finite: jax.Array
    sums: Sums
    """Per device."""


def _advance(
    plan: _Plan,
    state: TrainState,
    reference: Params,
    batch: PlacedBatch,
    start: Any,
    denominator: jax.Array,
    k: Any,
) -> tuple[TrainState, _Outcome]:
    """Update k; parameters and optimizer state stay as they are where it is not finite, or has no policy token."""
    divisor = _varying(jnp.maximum(denominator, 1))
    loss, gradient, sums = _accumulate(plan, _varying(state.params), reference, batch, start, divisor, k)
    loss = jax.lax.psum(loss, WINDOW_AXES)
    gradient = jax.lax.psum(gradient, WINDOW_AXES)
    norm = optax.tree.norm(gradient)
    updates, opt_state = plan.optimizer.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    # A sum of squares is finite only where every entry is.
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    keep = functools.partial(jnp.where, finite & (denominator > 0))
    kept = state._replace(
        params=jax.tree.map(keep, params, state.params), opt_state=jax.tree.map(keep, opt_state, state.opt_state)
    )
    return kept, _Outcome(loss, norm, finite, sums)


def _step(
    plan: _Plan, state: TrainState, reference: Params, batch: PlacedBatch, denominator: jax.Array
) -> tuple[TrainState, Sums]:
    """What each device runs under `shard_map`: the K updates of a batch."""
    reference = _varying(reference)
    if plan.num_updates == 1:
        state, outcome = _advance(plan, state, reference, batch, None, denominator[0], 0)
        return _counted(state), _metrics(outcome.loss, outcome.gradient_norm, ~outcome.finite, outcome.sums)
    start = _at_the_start(plan, _varying(state.params), reference, batch)

    def body(state: TrainState, each: tuple[jax.Array, jax.Array]) -> tuple[TrainState, _Outcome]:
        k, own = each
        return _advance(plan, state, reference, batch, start, own, k)

    numbers = jnp.arange(plan.num_updates, dtype=jnp.int32)
    state, outcomes = jax.lax.scan(body, state, (numbers, denominator))
    num_acting = jnp.maximum((denominator > 0).sum(), 1)
    sums = {k: v.max(axis=0) if k.startswith("max_") else v.sum(axis=0) for k, v in outcomes.sums.items()}
    loss = (outcomes.loss * denominator).sum() / jnp.maximum(denominator.sum(), 1)
    return _counted(state), _metrics(loss, outcomes.gradient_norm.sum() / num_acting, ~outcomes.finite, sums)


def _counted(state: TrainState) -> TrainState:
    """The clock counts batches."""
    return state._replace(step=state.step + 1)


def _metrics(loss: jax.Array, norm: jax.Array, skipped: jax.Array, sums: Sums) -> Sums:
    return {
        "loss": loss,
        "gradient_norm": norm,
        "nonfinite": skipped.sum(dtype=jnp.int32),
        **finalize(over_devices(sums)),
    }


class TrainStep:
    """The compiled updates of one objective on one mesh. Holds the executable, no state."""

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        *,
        objective: Objective,
        optimizer: optax.GradientTransformation,
        num_updates: int = 1,
        at_start: StartOfBatch | None = None,
        with_value_head: bool = False,
    ) -> None:
        """
        Args:
            with_value_head: the state has one, and a batch has rewards.
            num_updates: per batch, K.
            at_start: of the weights at the start of the batch; not evaluated at K = 1.
        """
        self.config = config
        self._head = value_head.fresh(config.model) if with_value_head else None
        self._num_updates = num_updates
        self._optimizer = optimizer
        self._replicated = placed(mesh, REPLICATED)
        self._windows = placed(mesh, WINDOWS)
        self._num_shards = config.mesh.data * config.mesh.fsdp
        self._executable: Any = None
        self._num_windows = 0
        self._init_optimizer = jax.jit(optimizer.init, out_shardings=self._replicated)
        plan = _Plan(objective, optimizer, config.learner.windows_per_microbatch, num_updates, at_start)
        self._step = jax.jit(
            jax.shard_map(
                functools.partial(_step, plan),
                mesh=mesh,
                in_specs=(REPLICATED, REPLICATED, PlacedBatch(WINDOWS, REPLICATED), REPLICATED),
                out_specs=(REPLICATED, REPLICATED),
                check_vma=True,
            ),
            donate_argnums=0,
        )

    def init_state(self, params: Params) -> TrainState:
        """Fresh optimizer state around `params` (host or device arrays; they are copied), and a fresh value head."""
        placed_params = self.put_params(self._with_head(params))
        return TrainState(
            params=placed_params,
            opt_state=self._init_optimizer(placed_params),
            step=jax.device_put(np.zeros((), np.int32), self._replicated),
        )

    def put_params(self, params: Params) -> Params:
        """Parameters onto the mesh, as a copy that donation of one state cannot take from another."""
        return jax.tree.map(lambda leaf: jax.device_put(np.array(leaf), self._replicated), params)

    def put_state(self, state: TrainState) -> TrainState:
        """A host state (say, a restored one) onto the mesh."""
        return jax.tree.map(lambda leaf: jax.device_put(np.array(leaf), self._replicated), state)

    def abstract_state(self) -> TrainState:
        """Shapes, types and placement of a state; nothing is allocated."""
        params = self._with_head(trained_parameters(self.config.model))
        state = TrainState(params, jax.eval_shape(self._optimizer.init, params), jax.ShapeDtypeStruct((), jnp.int32))
        return self._abstract(state)

    def _abstract(self, tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._replicated), tree)

    def _with_head(self, params: Params) -> Params:
        return params if self._head is None else value_head.attached(params, self._head)

    def compile(self, num_windows: int) -> None:
        """Make the executable for batches of at most so many windows.

        Raises:
            ConfigError: it does not divide into micro-batches on every device.
        """
        unit = self.config.microbatch_windows
        if num_windows < 1 or num_windows % unit:
            raise ConfigError(
                "num_windows",
                num_windows,
                f"a multiple of windows_per_microbatch * data shards = {unit}",
                "Round it up.",
            )
        shape = (num_windows, self.config.learner.window_tokens)
        kinds = Batch(jnp.int32, jnp.int32, jnp.int32, jnp.bool_, jnp.float32, jnp.float32, jnp.float32, jnp.bool_)
        if self._head is not None:
            kinds = kinds._replace(rewards=jnp.float32)
        windows = jax.tree.map(lambda kind: jax.ShapeDtypeStruct(shape, kind, sharding=self._windows), kinds)
        batch = PlacedBatch(windows, jax.ShapeDtypeStruct((), jnp.int32, sharding=self._replicated))
        state = self.abstract_state()
        denominator = jax.ShapeDtypeStruct((self._num_updates,), jnp.float32, sharding=self._replicated)
        reference = self._abstract(abstract_parameters(self.config.model.base()))
        self._executable = self._step.lower(state, reference, batch, denominator).compile()
        self._num_windows = num_windows

    def put(self, batch: Any) -> PlacedBatch:
        """Host arrays `[n, W]`, named as in `Batch`, onto the mesh in the compiled shape.

        Windows go to the data shards in turn, so that every shard has as many micro-batches to do.

        Raises:
            ConfigError: more windows than were compiled, or of another width.
        """
        num_windows, width = batch.tokens.shape
        if num_windows > self._num_windows or width != self.config.learner.window_tokens:
            raise ConfigError(
                "batch",
                (num_windows, width),
                f"at most {self._num_windows} windows of {self.config.learner.window_tokens} tokens",
                "Compile for larger batches, or take fewer groups.",
            )
        unit = self.config.microbatch_windows
        arrays = Batch(*(getattr(batch, name) for name in Batch._fields))
        windows = jax.tree.map(lambda array: jax.device_put(self._dealt(array), self._windows), arrays)
        return PlacedBatch(windows, jax.device_put(np.int32(-(-num_windows // unit)), self._replicated))

    def _dealt(self, array: np.ndarray) -> np.ndarray:
        """Padded to the compiled number of windows; row i lies on shard i mod `num_shards`."""
        padded = np.zeros((self._num_windows, *array.shape[1:]), array.dtype)
        padded[: len(array)] = array
        dealt = padded.reshape(-1, self._num_shards, *array.shape[1:]).swapaxes(0, 1)
        return np.ascontiguousarray(dealt).reshape(padded.shape)

    def __call__(
        self, state: TrainState, reference: Params, batch: PlacedBatch, denominator: np.ndarray | float
    ) -> tuple[TrainState, Mapping[str, jax.Array]]:
        """The updates of one batch; `state` is given up.

        Args:
            reference: parameters of the KL reference on the mesh (`put_params`).
            batch: from `put`.
            denominator: float32 [K], or a number at K = 1. What the loss of each update divides its sum by, such as
                its policy tokens; 0 where it has none, which then changes nothing.

        Returns:
            The new state, and scalars still on the device: sums and means over all updates; the loss is their
            mean by denominator, the gradient's norm that of the updates with policy tokens. `nonfinite` counts those
            whose loss or gradient was not finite: then parameters and optimizer state are those before it, and
            the step counts all the same.
        """
        assert self._executable is not None, "compile before the first step"
        divisors = np.atleast_1d(np.asarray(denominator, np.float32))
        assert divisors.shape == (self._num_updates,), f"one denominator per update, received {divisors.shape}"
        return self._executable(state, reference, batch, jax.device_put(divisors, self._replicated))


def attention_for(model: ModelConfig, mesh: Mesh) -> ModelConfig:
    """The model with the attention backend that the mesh's devices take.

    Raises:
        ConfigError: Pallas kernels are asked for on devices that are no TPUs.
    """
    platform = mesh.devices.flat[0].platform
    if model.attention == "pallas" and platform != "tpu":
        raise ConfigError(
            "model.attention", model.attention, f"auto, dense, blocks or segments on {platform}", "Leave it at auto."
        )
    if model.attention == "auto" and platform == "tpu":
        return dataclasses.replace(model, attention="pallas")
    return model


def make_train_step(config: RunConfig, mesh: Mesh) -> TrainStep:
    """Reinforcement learning: the run's algorithm and optimizer."""
    model = attention_for(config.model, mesh)
    return TrainStep(
        config,
        mesh,
        objective=policy_objective(model, config.algorithm),
        optimizer=make_optimizer(config.optimizer),
        num_updates=config.learner.updates_per_batch,
        at_start=start_of_batch(model, config.algorithm),
        with_value_head=config.algorithm.has_value_head,
    )


def make_supervised_step(config: RunConfig, mesh: Mesh) -> TrainStep:
    """The warm start: cross entropy, at the warm start's learning rate."""
    optimizer = OptimizerConfig(learning_rate=config.warm_start.learning_rate)
    objective = supervised_objective(attention_for(config.model, mesh))
    return TrainStep(config, mesh, objective=objective, optimizer=make_optimizer(optimizer))

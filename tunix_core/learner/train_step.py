"""One optimizer update as a compiled `shard_map` over the mesh; a single device is the trivial mesh.

The whole step is manual with `check_vma=True`: parameters are replicated and cast to varying before
the micro-batch scan, so that their gradients stay per device until the one explicit sum. (Without the
check, the loss was exact and the gradients silently wrong.)

A batch always has the shape that was compiled, ahead of time; how many of its micro-batches hold
anything is data, the bound of the loop over them. So one executable serves every batch without
paying for its padding, and nothing compiles after warm-up.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from tunix_core.config import OptimizerConfig, RunConfig
from tunix_core.distributed.mesh import REPLICATED, WINDOW_AXES, WINDOWS, placed
from tunix_core.errors import ConfigError
from tunix_core.learner.objectives import (
    Batch,
    Objective,
    Sums,
    finalize,
    policy_objective,
    supervised_objective,
)
from tunix_core.models.parameters import Params, abstract_parameters, trained_parameters


class TrainState(NamedTuple):
    """Everything that an update changes."""

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


def _over_devices(sums: Sums) -> Sums:
    return {
        k: jax.lax.pmax(v, WINDOW_AXES) if k.startswith("max_") else jax.lax.psum(v, WINDOW_AXES)
        for k, v in sums.items()
    }


def _varying(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, WINDOW_AXES, to="varying"), tree)


def _accumulate(
    objective: Objective, params: Params, reference: Params, batch: PlacedBatch, denominator: jax.Array, microbatch: int
) -> tuple[jax.Array, Params, Sums]:
    """Loss, gradient and sums of this device's windows, micro-batch by micro-batch; all per device."""
    value_and_grad = jax.value_and_grad(objective, has_aux=True)

    def evaluate(i: Any) -> tuple[jax.Array, Params, Sums]:
        windows = jax.tree.map(
            lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, i * microbatch, microbatch), batch.windows
        )
        (loss, sums), gradient = value_and_grad(params, reference, windows, denominator)
        return loss, gradient, sums

    def body(i: jax.Array, total: tuple[jax.Array, Params, Sums]) -> tuple[jax.Array, Params, Sums]:
        loss, gradient, sums = total
        more_loss, more_gradient, more_sums = evaluate(i)
        return loss + more_loss, jax.tree.map(jnp.add, gradient, more_gradient), _combine(sums, more_sums)

    shapes = jax.eval_shape(evaluate, 0)
    zeros = _varying(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))
    return jax.lax.fori_loop(0, batch.num_microbatches, body, zeros)


def _update(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    microbatch: int,
    state: TrainState,
    reference: Params,
    batch: PlacedBatch,
    denominator: jax.Array,
) -> tuple[TrainState, Sums]:
    """What each device runs under `shard_map`."""
    loss, gradient, sums = _accumulate(
        objective, _varying(state.params), _varying(reference), batch, _varying(denominator), microbatch
    )
    loss = jax.lax.psum(loss, WINDOW_AXES)
    gradient = jax.lax.psum(gradient, WINDOW_AXES)
    norm = optax.tree.norm(gradient)
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    # A sum of squares is finite only where every entry is.
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    keep = functools.partial(jnp.where, finite)
    kept = TrainState(
        params=jax.tree.map(keep, params, state.params),
        opt_state=jax.tree.map(keep, opt_state, state.opt_state),
        step=state.step + 1,
    )
    metrics = {
        "loss": loss,
        "gradient_norm": norm,
        "nonfinite": 1 - finite.astype(jnp.int32),
        **finalize(_over_devices(sums)),
    }
    return kept, metrics


class TrainStep:
    """A compiled update of one objective on one mesh. Holds the executable, no state."""

    def __init__(
        self, config: RunConfig, mesh: Mesh, *, objective: Objective, optimizer: optax.GradientTransformation
    ) -> None:
        self._config = config
        self._optimizer = optimizer
        self._replicated = placed(mesh, REPLICATED)
        self._windows = placed(mesh, WINDOWS)
        self._num_shards = config.mesh.data * config.mesh.fsdp
        self._executable: Any = None
        self._num_windows = 0
        self._init_optimizer = jax.jit(optimizer.init, out_shardings=self._replicated)
        local = functools.partial(_update, objective, optimizer, config.learner.windows_per_microbatch)
        self._step = jax.jit(
            jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(REPLICATED, REPLICATED, PlacedBatch(WINDOWS, REPLICATED), REPLICATED),
                out_specs=(REPLICATED, REPLICATED),
                check_vma=True,
            ),
            donate_argnums=0,
        )

    def init_state(self, params: Params) -> TrainState:
        """Fresh optimizer state around `params` (host or device arrays; they are copied)."""
        placed_params = self.put_params(params)
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
        params = trained_parameters(self._config.model)
        state = TrainState(params, jax.eval_shape(self._optimizer.init, params), jax.ShapeDtypeStruct((), jnp.int32))
        return self._abstract(state)

    def _abstract(self, tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._replicated), tree)

    def compile(self, num_windows: int) -> None:
        """Make the executable for batches of at most so many windows.

        Raises:
            ConfigError: it does not divide into micro-batches on every device.
        """
        unit = self._config.learner.windows_per_microbatch * self._num_shards
        if num_windows < 1 or num_windows % unit:
            raise ConfigError(
                "num_windows",
                num_windows,
                f"a multiple of windows_per_microbatch * data shards = {unit}",
                "Round it up.",
            )
        shape = (num_windows, self._config.learner.window_tokens)
        kinds = Batch(jnp.int32, jnp.int32, jnp.int32, jnp.bool_, jnp.float32, jnp.float32, jnp.float32, jnp.bool_)
        windows = Batch(*(jax.ShapeDtypeStruct(shape, kind, sharding=self._windows) for kind in kinds))
        batch = PlacedBatch(windows, jax.ShapeDtypeStruct((), jnp.int32, sharding=self._replicated))
        state = self.abstract_state()
        denominator = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._replicated)
        reference = self._abstract(abstract_parameters(self._config.model.base()))
        self._executable = self._step.lower(state, reference, batch, denominator).compile()
        self._num_windows = num_windows

    def put(self, batch: Any) -> PlacedBatch:
        """Host arrays `[n, W]`, named as in `Batch`, onto the mesh in the compiled shape.

        Windows go to the data shards in turn, so that every shard has as many micro-batches to do.

        Raises:
            ConfigError: more windows than were compiled, or of another width.
        """
        num_windows, width = batch.tokens.shape
        if num_windows > self._num_windows or width != self._config.learner.window_tokens:
            raise ConfigError(
                "batch",
                (num_windows, width),
                f"at most {self._num_windows} windows of {self._config.learner.window_tokens} tokens",
                "Compile for larger batches, or take fewer groups.",
            )
        unit = self._config.learner.windows_per_microbatch * self._num_shards
        windows = Batch(*(jax.device_put(self._dealt(getattr(batch, name)), self._windows) for name in Batch._fields))
        return PlacedBatch(windows, jax.device_put(np.int32(-(-num_windows // unit)), self._replicated))

    def _dealt(self, array: np.ndarray) -> np.ndarray:
        """Padded to the compiled number of windows; row i lies on shard i mod `num_shards`."""
        padded = np.zeros((self._num_windows, *array.shape[1:]), array.dtype)
        padded[: len(array)] = array
        dealt = padded.reshape(-1, self._num_shards, *array.shape[1:]).swapaxes(0, 1)
        return np.ascontiguousarray(dealt).reshape(padded.shape)

    def __call__(
        self, state: TrainState, reference: Params, batch: PlacedBatch, denominator: float
    ) -> tuple[TrainState, Mapping[str, jax.Array]]:
        """One update; `state` is given up.

        Args:
            reference: parameters of the KL reference on the mesh (`put_params`).
            batch: from `put`.
            denominator: policy tokens of the whole batch; the loss is their mean. At least 1.

        Returns:
            The new state, and scalars still on the device. `nonfinite` is 1 where loss or gradient was
            not finite: then parameters and optimizer state are the old ones, and the step counts all the same.
        """
        assert self._executable is not None, "compile before the first step"
        divisor = jax.device_put(np.float32(max(denominator, 1)), self._replicated)
        return self._executable(state, reference, batch, divisor)


def make_train_step(config: RunConfig, mesh: Mesh) -> TrainStep:
    """Reinforcement learning: the run's algorithm and optimizer."""
    return TrainStep(
        config,
        mesh,
        objective=policy_objective(config.model, config.algorithm),
        optimizer=make_optimizer(config.optimizer),
    )


def make_supervised_step(config: RunConfig, mesh: Mesh) -> TrainStep:
    """The warm start: cross entropy, at the warm start's learning rate."""
    optimizer = OptimizerConfig(learning_rate=config.warm_start.learning_rate)
    return TrainStep(config, mesh, objective=supervised_objective(config.model), optimizer=make_optimizer(optimizer))

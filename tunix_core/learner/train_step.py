"""One optimizer update as a compiled `shard_map` over the mesh; a single device is the trivial mesh.

The whole step is manual with `check_vma=True`: parameters are replicated and cast to varying before
the micro-batch scan, so that their gradients stay per device until the one explicit sum. (Without the
check, the loss was exact and the gradients silently wrong.)

Executables are compiled ahead of time for each number of windows; they refuse any other shape, so
nothing compiles after warm-up.
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
from tunix_core.models.decoder import Params, abstract_parameters


class TrainState(NamedTuple):
    """Everything that an update changes."""

    params: Params
    opt_state: Any
    step: Any  # int32 []


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
    objective: Objective, params: Params, reference: Params, batch: Batch, denominator: jax.Array, microbatch: int
) -> tuple[jax.Array, Params, Sums]:
    """Loss, gradient and sums of this device's windows, micro-batch by micro-batch; all per device."""
    num_microbatches = batch.tokens.shape[0] // microbatch
    parts = jax.tree.map(lambda leaf: leaf.reshape(num_microbatches, microbatch, *leaf.shape[1:]), batch)
    value_and_grad = jax.value_and_grad(objective, has_aux=True)

    def evaluate(windows: Batch) -> tuple[jax.Array, Params, Sums]:
        (loss, sums), gradient = value_and_grad(params, reference, windows, denominator)
        return loss, gradient, sums

    # One traced copy of the pass: the carry starts as zeros of its shapes instead of a first pass.
    shapes = jax.eval_shape(evaluate, jax.tree.map(lambda leaf: leaf[0], parts))
    zeros = _varying(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))

    def body(carry: tuple[jax.Array, Params, Sums], windows: Batch) -> tuple[tuple[jax.Array, Params, Sums], None]:
        loss, gradient, sums = carry
        more_loss, more_gradient, more_sums = evaluate(windows)
        return (loss + more_loss, jax.tree.map(jnp.add, gradient, more_gradient), _combine(sums, more_sums)), None

    return jax.lax.scan(body, zeros, parts)[0]


def _update(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    microbatch: int,
    state: TrainState,
    reference: Params,
    batch: Batch,
    denominator: jax.Array,
) -> tuple[TrainState, Sums]:
    """What each device runs under `shard_map`."""
    loss, gradient, sums = _accumulate(
        objective, _varying(state.params), _varying(reference), batch, _varying(denominator), microbatch
    )
    loss = jax.lax.psum(loss, WINDOW_AXES)
    gradient = jax.lax.psum(gradient, WINDOW_AXES)
    norm = optax.global_norm(gradient)
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
    """Compiled updates of one objective on one mesh. Holds executables, no state.

    Raises (from `__call__` and `put`):
        ConfigError: a number of windows that was not compiled.
    """

    def __init__(
        self, config: RunConfig, mesh: Mesh, *, objective: Objective, optimizer: optax.GradientTransformation
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._optimizer = optimizer
        self._replicated = placed(mesh, REPLICATED)
        self._windows = placed(mesh, WINDOWS)
        self._executables: dict[int, Any] = {}
        self._init_optimizer = jax.jit(optimizer.init, out_shardings=self._replicated)
        local = functools.partial(_update, objective, optimizer, config.learner.windows_per_microbatch)
        self._step = jax.jit(
            jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(REPLICATED, REPLICATED, WINDOWS, REPLICATED),
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
        params = abstract_parameters(self._config.model)
        state = TrainState(params, jax.eval_shape(self._optimizer.init, params), jax.ShapeDtypeStruct((), jnp.int32))
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._replicated), state)

    def compile(self, num_windows: int) -> None:
        """Make the executable for a batch of so many windows.

        Raises:
            ConfigError: it does not divide into micro-batches on every device.
        """
        unit = self._config.learner.windows_per_microbatch * self._config.mesh.data
        if num_windows < 1 or num_windows % unit:
            raise ConfigError(
                "num_windows",
                num_windows,
                f"a multiple of windows_per_microbatch * mesh.data = {unit}",
                "Pad the batch.",
            )
        if num_windows in self._executables:
            return
        shape = (num_windows, self._config.learner.window_tokens)
        kinds = Batch(jnp.int32, jnp.int32, jnp.int32, jnp.bool_, jnp.float32, jnp.float32, jnp.float32)
        batch = Batch(*(jax.ShapeDtypeStruct(shape, kind, sharding=self._windows) for kind in kinds))
        state = self.abstract_state()
        denominator = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._replicated)
        self._executables[num_windows] = self._step.lower(state, state.params, batch, denominator).compile()

    def put(self, batch: Any) -> Batch:
        """Host arrays, named as in `Batch`, onto the mesh: each device gets its own windows."""
        self._executable(len(batch.tokens))
        return Batch(*(jax.device_put(np.asarray(getattr(batch, name)), self._windows) for name in Batch._fields))

    def __call__(
        self, state: TrainState, reference: Params, batch: Batch, denominator: float
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
        divisor = jax.device_put(np.float32(max(denominator, 1)), self._replicated)
        return self._executable(batch.tokens.shape[0])(state, reference, batch, divisor)

    def _executable(self, num_windows: int) -> Any:
        try:
            return self._executables[num_windows]
        except KeyError:
            raise ConfigError(
                "num_windows",
                num_windows,
                f"a compiled count: {sorted(self._executables)}",
                "Pad the batch or compile first.",
            ) from None


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

"""A batch's optimizer updates as one executable over the mesh, and where everything that it takes lies.

One `shard_map`, manual over all axes and with checked types (`update` is its program); a single device is the trivial
mesh. Batches have the shape that was compiled, ahead of time: nothing compiles after warm-up.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from tunix_core.config import OptimizerConfig, RunConfig
from tunix_core.distributed.hosts import Share, share_of
from tunix_core.distributed.mesh import REPLICATED, parallel_of, placed, windows_spec
from tunix_core.errors import ConfigError
from tunix_core.learner import update, value_head
from tunix_core.learner.objectives import Batch, Objective, Sums, policy_objective, supervised_objective
from tunix_core.learner.update import PlacedBatch, Plan, TrainState
from tunix_core.model_config import ModelConfig
from tunix_core.models.parameters import Params, abstract_parameters, trained_parameters
from tunix_core.models.partitioning import as_used, partition_specs
from tunix_core.storage.parts import Parts


def clip_by_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """`optax.clip_by_global_norm` for gradients of which a device holds parts: the norm is passed in."""

    def scale(updates: Any, state: Any, params: Any = None, *, global_norm: jax.Array, **_: Any) -> tuple[Any, Any]:
        del params
        factor = jnp.where(global_norm < max_norm, 1.0, max_norm / global_norm)
        return jax.tree.map(lambda leaf: leaf * factor, updates), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), scale)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW behind a clip of the global norm, with linear warm-up."""
    rate: Any = config.learning_rate
    if config.warmup_steps:
        rate = optax.linear_schedule(
            config.learning_rate / config.warmup_steps, config.learning_rate, config.warmup_steps
        )
    return optax.chain(
        clip_by_norm(config.gradient_clip_norm),
        optax.adamw(
            rate,
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mu_dtype=config.first_moment_dtype,
        ),
    )


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
    ) -> None:
        """
        Args:
            objective: with values, the state has a value head, and a batch has rewards.
            optimizer: acts on each parameter alone; it is passed `global_norm`, of the whole gradient.
            num_updates: per batch, K.
        """
        self.config = config
        self.mesh = mesh
        self._objective = objective
        self._head = value_head.fresh(config.model) if objective.has_values else None
        self._optimizer = optimizer
        parallel = parallel_of(mesh)
        self._executables: dict[int, Any] = {}
        self._num_windows: dict[int, int] = {}
        """By tokens of a window."""

        trained = self._with_head(trained_parameters(config.model))
        self._param_specs = partition_specs(trained, parallel)
        self._state_specs = TrainState(
            params=self._param_specs,
            opt_state=optax.tree_utils.tree_map_params(
                optimizer,
                lambda _, spec: spec,
                jax.eval_shape(optimizer.init, trained),
                self._param_specs,
                transform_non_params=lambda _: REPLICATED,
            ),
            step=REPLICATED,
        )
        base = abstract_parameters(config.model.base())
        self._reference_specs = partition_specs(base, parallel) if objective.reads_reference else None
        batch_specs = PlacedBatch(windows_spec(parallel), REPLICATED)
        self._windows = placed(mesh, batch_specs.windows)
        self._replicated = placed(mesh, REPLICATED)
        self.plan = Plan(
            objective=objective,
            optimizer=optimizer,
            parallel=parallel,
            specs=self._param_specs,
            microbatch=config.learner.windows_per_microbatch,
            num_updates=num_updates,
            schedule=config.mesh.schedule,
        )
        self._init_optimizer = jax.jit(optimizer.init, out_shardings=self._placements(self._state_specs.opt_state))
        self._step = jax.jit(
            jax.shard_map(
                functools.partial(update.step, self.plan),
                mesh=mesh,
                in_specs=(self._state_specs, self._reference_specs, batch_specs, REPLICATED),
                out_specs=(self._state_specs, REPLICATED),
                check_vma=True,
            ),
            donate_argnums=0,
        )
        self._held_out = jax.jit(
            jax.shard_map(
                functools.partial(update.held_out, self.plan),
                mesh=mesh,
                in_specs=(self._param_specs, self._reference_specs, batch_specs),
                out_specs=REPLICATED,
                check_vma=True,
            )
        )

    @property
    def num_windows(self) -> int:
        """Of the largest batch of the largest windows that it is compiled for."""
        return self._num_windows[max(self._num_windows)]

    # ---- placement --------------------------------------------------------------------------------

    def _placements(self, specs: Any) -> Any:
        return jax.tree.map(functools.partial(placed, self.mesh), specs)

    def _put(self, tree: Any, specs: Any) -> Any:
        """Onto the mesh, as copies that donation of one state cannot take from another; of several hosts each its parts."""
        return jax.tree.map(_placed_copy, tree, self._placements(specs))

    def _abstract(self, tree: Any, specs: Any) -> Any:
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            tree,
            self._placements(specs),
        )

    def _with_head(self, params: Params) -> Params:
        return params if self._head is None else value_head.attached(params, self._head)

    def init_state(self, params: Params) -> TrainState:
        """Fresh optimizer state around `params` (host or device arrays; they are copied), and a fresh value head."""
        placed_params = self._put(self._with_head(params), self._param_specs)
        return TrainState(
            params=placed_params,
            opt_state=self._init_optimizer(placed_params),
            step=_placed_copy(np.zeros((), np.int32), self._replicated),
        )

    def put_reference(self, params: Params) -> Params:
        """Whole weights of the KL reference, or of the base under adapters, onto the mesh, as forward passes use them."""
        host = jax.tree.map(lambda leaf: leaf if isinstance(leaf, Parts) else np.asarray(leaf), params)
        stored = as_used(host, self.config.model.compute_dtype)
        return self._put(stored, partition_specs(stored, self.plan.parallel))

    def put_state(self, state: TrainState) -> TrainState:
        """A host state (say, a restored one) onto the mesh."""
        return self._put(state, self._state_specs)

    def abstract_state(self) -> TrainState:
        """Shapes, types and placement of a state; nothing is allocated."""
        params = self._with_head(trained_parameters(self.config.model))
        opt_state = jax.eval_shape(self._optimizer.init, params)
        state = TrainState(params, opt_state, jax.ShapeDtypeStruct((), jnp.int32))
        return self._abstract(state, self._state_specs)

    def put(self, batch: Any) -> PlacedBatch:
        """Host arrays `[n, W]`, named as in `Batch`, onto the mesh in the compiled shape.

        Windows go to the data shards in turn, so that every shard has as many micro-batches to do. Of several hosts
        each passes the windows of its own shards, all as many, and puts them on its own devices alone.

        Raises:
            ConfigError: more windows than were compiled, or of another width.
        """
        share = share_of(self.mesh)
        num_windows, width = batch.tokens.shape
        largest = {tokens: share.num_own(number) for tokens, number in self._num_windows.items()}
        if num_windows > largest.get(width, 0):
            raise ConfigError(
                "batch",
                (num_windows, width),
                " or ".join(f"at most {number} windows of {tokens} tokens" for tokens, number in largest.items()),
                "Compile for larger batches, or take fewer groups.",
            )
        unit = self.config.learner.windows_per_microbatch * len(share.own)
        arrays = Batch(*(getattr(batch, name) for name in Batch._fields))
        windows = jax.tree.map(lambda array: self._put_windows(array, share), arrays)
        return PlacedBatch(windows, _placed_copy(np.int32(-(-num_windows // unit)), self._replicated))

    def _put_windows(self, array: np.ndarray, share: Share) -> jax.Array:
        """Padded to the compiled number of windows; row i lies on the i-th of this host's shards, in turn."""
        num_windows = self._num_windows[array.shape[1]]
        num_own, per_shard = share.num_own(num_windows), num_windows // share.num_shards
        padded = np.zeros((num_own, *array.shape[1:]), array.dtype)
        padded[: len(array)] = array
        dealt = padded.reshape(per_shard, len(share.own), *array.shape[1:]).swapaxes(0, 1)
        if self._windows.is_fully_addressable:
            return jax.device_put(np.ascontiguousarray(dealt).reshape(padded.shape), self._windows)

        def of_device(index: Any) -> np.ndarray:
            return dealt[share.own.index((index[0].start or 0) // per_shard)]

        shape = (num_windows, *array.shape[1:])
        return jax.make_array_from_callback(shape, self._windows, of_device)

    # ---- execution --------------------------------------------------------------------------------

    def lower(self, num_windows: int, window_tokens: int = 0) -> Any:
        """The step as JAX's lowering, for batches of at most so many windows.

        Args:
            window_tokens: of one; 0: the configured size.

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
        shape = (num_windows, window_tokens or self.config.learner.window_tokens)
        kinds = Batch(jnp.int32, jnp.int32, jnp.int32, jnp.bool_, jnp.float32, jnp.float32, jnp.float32, jnp.uint8)
        if self._head is not None:
            kinds = kinds._replace(rewards=jnp.float32)
        windows = jax.tree.map(lambda kind: jax.ShapeDtypeStruct(shape, kind, sharding=self._windows), kinds)
        batch = PlacedBatch(windows, jax.ShapeDtypeStruct((), jnp.int32, sharding=self._replicated))
        denominator = jax.ShapeDtypeStruct((self.plan.num_updates,), jnp.float32, sharding=self._replicated)
        return self._step.lower(self.abstract_state(), self._abstract_reference(), batch, denominator)

    def _abstract_reference(self) -> Params | None:
        if self._reference_specs is None:
            return None
        base = as_used(abstract_parameters(self.config.model.base()), self.config.model.compute_dtype)
        return self._abstract(base, self._reference_specs)

    def compile(self, num_windows: int, window_tokens: int = 0) -> None:
        """Make the executable for batches of at most so many windows of that size. Arguments and errors as of `lower`."""
        width = window_tokens or self.config.learner.window_tokens
        self._executables[width] = self.lower(num_windows, width).compile()
        self._num_windows[width] = num_windows

    def __call__(
        self, state: TrainState, reference: Params | None, batch: PlacedBatch, denominator: np.ndarray | float
    ) -> tuple[TrainState, Mapping[str, jax.Array]]:
        """The updates of one batch; `state` is given up.

        Args:
            reference: from `put_reference`; None where the objective reads none.
            batch: from `put`.
            denominator: float32 [K], or a number at K = 1. What the loss of each update divides its sum by, such as
                its policy tokens; 0 where it has none, which then changes nothing.

        Returns:
            The new state, and scalars still on the device: sums and means over all updates; the loss is their
            mean by denominator, the gradient's norm that of the updates with policy tokens. `nonfinite` counts those
            whose loss or gradient was not finite: then parameters and optimizer state are those before it, and
            the step counts all the same.
        """
        divisors = np.atleast_1d(np.asarray(denominator, np.float32))
        assert divisors.shape == (self.plan.num_updates,), f"one denominator per update, received {divisors.shape}"
        frozen = reference if self._objective.reads_reference else None
        execute = self._executables[batch.windows.tokens.shape[1]]
        return execute(state, frozen, batch, _placed_copy(divisors, self._replicated))

    def held_out(self, state: TrainState, reference: Params | None, batch: PlacedBatch) -> Sums:
        """The objective's sums over a batch from `put`, at denominator 1, `loss` among them. Compiles at the first call."""
        return self._held_out(state.params, reference if self._objective.reads_reference else None, batch)


def _placed_copy(leaf: Any, place: NamedSharding) -> jax.Array:
    """A host array (or what reads like one) on the mesh; a host that has devices of a part copies, or reads, that part alone."""
    if isinstance(leaf, Parts):
        mine = place.addressable_devices_indices_map(leaf.shape).values()
        boxes = {_bounds(index): index for index in mine if index is not None}  # devices may have one in common
        read = dict(zip(boxes, leaf.read(list(boxes.values())), strict=True))
        return jax.make_array_from_callback(leaf.shape, place, lambda index: np.array(read[_bounds(index or ())]))
    if place.is_fully_addressable:
        return jax.device_put(np.array(leaf), place)
    # `device_put` would compare the array between all hosts first, with a collective.
    return jax.make_array_from_callback(leaf.shape, place, lambda index: np.array(leaf[index]), dtype=leaf.dtype)


def _bounds(index: tuple[slice, ...]) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((s.start, s.stop) for s in index)


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
    )


def make_supervised_step(config: RunConfig, mesh: Mesh) -> TrainStep:
    """The warm start: cross entropy, at the warm start's learning rate."""
    optimizer = OptimizerConfig(
        learning_rate=config.warm_start.learning_rate, first_moment_dtype=config.optimizer.first_moment_dtype
    )
    objective = supervised_objective(attention_for(config.model, mesh))
    return TrainStep(config, mesh, objective=objective, optimizer=make_optimizer(optimizer))

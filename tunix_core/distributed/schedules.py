"""Micro-batches through the stages of a pipeline: their predictions, or their gradients, under `shard_map`.

All stages run one program in lock-step; in a tick each does its part and hands one array to a neighbour.

| schedule | ticks | inputs that a stage holds |
|---|---|---|
| 1f1b | S - 1 forward, n of both, S - 1 backward | of at most 2 S - 1 micro-batches |
| gpipe | n + S - 1 forward, then as many backward | of all n |

With S stages and n micro-batches the devices idle (S - 1) / (n + S - 1) of a batch in both. What a stage holds of a
micro-batch between its forward and its backward part is its input alone; the backward part runs the stage
forward once more (but for the last stage, which has nothing in between). 1f1b is PipeDream-Flush (Narayanan et al.,
arXiv:2104.04473), GPipe that of Huang et al. (arXiv:1811.06965). The number of micro-batches is data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from tunix_core.distributed.parallel import Parallel, as_varying, only_where, varying_over, zeros_of

Tree = Any


class Pipeline(NamedTuple):
    """What happens to micro-batch `i` (int32 [], valid) on its way; `params` are the device's, varying over all axes."""

    parallel: Parallel
    feed: Callable[[Tree, Any], jax.Array]
    """(params, i) -> what enters the first stage."""
    run: Callable[[Tree, jax.Array, Any], jax.Array]
    """(params, x, i) -> x, a stage's layers."""
    finish: Callable[[Tree, jax.Array, Any], Tree]
    """(params, x, i) -> outputs, behind the last stage."""

    def whole(self, params: Tree, i: Any) -> Tree:
        """All of it, where there is one stage."""
        return self.finish(params, self.run(params, self.feed(params, i), i), i)


class _Stage(NamedTuple):
    """One device's view of a pipeline of several stages."""

    pipeline: Pipeline
    count: Any
    """int32 [], micro-batches."""

    @property
    def size(self) -> int:
        return self.pipeline.parallel.stage

    @property
    def number(self) -> jax.Array:
        return jax.lax.axis_index("stage")

    @property
    def is_last(self) -> jax.Array:
        return self.number == self.size - 1

    def valid(self, i: jax.Array) -> jax.Array:
        return (i >= 0) & (i < self.count)

    def clipped(self, i: jax.Array) -> jax.Array:
        return jnp.clip(i, 0, self.count - 1)

    def enter(self, params: Tree, x: jax.Array, i: jax.Array) -> jax.Array:
        """The stage's input: the first one's comes from the windows."""
        return jax.lax.cond(self.number == 0, lambda: self.pipeline.feed(params, i), lambda: x)

    def empty(self, params: Tree) -> jax.Array:
        """Zeros like what passes between stages."""
        return self.pipeline.parallel.vary(zeros_of(jax.eval_shape(self.pipeline.feed, params, 0)))

    def finish(self, params: Tree, y: jax.Array, i: jax.Array) -> Tree:
        return only_where(self.is_last, self.pipeline.finish, params, y, i)


def sweep(pipeline: Pipeline, params: Tree, count: Any, whole: Tree, write: Callable[[Tree, Tree, Any], Tree]) -> Tree:
    """Forward only: `whole = write(whole, outputs, i)` of each micro-batch; with stages, on the last one's devices."""
    if pipeline.parallel.stage == 1:
        return jax.lax.fori_loop(0, count, lambda i, whole: write(whole, pipeline.whole(params, i), i), whole)
    stage = _Stage(pipeline, count)

    def tick(t: Any, carry: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
        x, whole = carry
        which = t - stage.number
        i = stage.clipped(which)
        y = pipeline.run(params, stage.enter(params, x, i), i)
        written = write(whole, stage.finish(params, y, i), i)
        mine = stage.valid(which) & stage.is_last
        whole = jax.tree.map(lambda new, old: jnp.where(mine, new, old), written, whole)
        return pipeline.parallel.to_next_stage(y), whole

    whole = jax.tree.map(lambda leaf: varying_over(leaf, ("stage",)), whole)
    return jax.lax.fori_loop(0, count + stage.size - 1, tick, (stage.empty(params), whole))[1]


def accumulate(
    pipeline: Pipeline,
    params: Tree,
    count: Any,
    *,
    combine: Callable[[Tree, Tree], Tree],
    schedule: Literal["1f1b", "gpipe"] = "1f1b",
    max_count: int = 1,
) -> tuple[jax.Array, Tree, Tree]:
    """Loss, gradient and auxiliary outputs over all micro-batches; each the device's own part.

    Args:
        pipeline: whose outputs are (loss, auxiliary outputs that are zero or more).
        combine: adds up two auxiliary outputs.
        max_count: what gpipe keeps room for.
    """
    if pipeline.parallel.stage == 1:
        return _alone(pipeline, params, count, combine)
    stage = _Stage(pipeline, count)
    if schedule == "gpipe":
        return _gpipe(stage, params, combine, max_count)
    return _one_f_one_b(stage, params, combine)


_Total = tuple[jax.Array, Tree, Tree]
"""Loss, gradient, auxiliary outputs."""


def _alone(pipeline: Pipeline, params: Tree, count: Any, combine: Callable[[Tree, Tree], Tree]) -> _Total:
    value_and_grad = jax.value_and_grad(pipeline.whole, has_aux=True)

    def evaluate(i: Any) -> _Total:
        (loss, extra), gradient = value_and_grad(params, i)
        return loss, gradient, extra

    def body(i: Any, total: _Total) -> _Total:
        loss, gradient, extra = evaluate(i)
        # Without it libtpu 0.0.42 fails on a sum over fsdp that is cast before it is added (a RET_CHECK, no refusal).
        gradient = jax.lax.optimization_barrier(gradient)
        return total[0] + loss, jax.tree.map(jnp.add, total[1], gradient), combine(total[2], extra)

    loss, gradient, extra = jax.eval_shape(evaluate, 0)
    return jax.lax.fori_loop(0, count, body, (zeros_of(loss), _zero_sum(gradient), zeros_of(extra)))


def _backward(
    stage: _Stage, params: Tree, total: _Total, combine: Callable[[Tree, Tree], Tree], which: Any, x: Any, pulled: Any
) -> tuple[_Total, jax.Array]:
    """Add the part of micro-batch `which`, from the stage's input `x` and the cotangent `pulled` of its output.

    Returns:
        The total, and the cotangent of the stage's input. Nothing is added where there is no such one.
    """
    is_valid, i = stage.valid(which), stage.clipped(which)

    def forward(params: Tree, x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Tree]:
        y = stage.pipeline.run(params, stage.enter(params, x, i), i)
        loss, extra = stage.finish(params, y, i)
        return (y, loss), extra

    (y, loss), pull, extra = jax.vjp(forward, params, x, has_aux=True)
    into_y = jnp.where(is_valid & ~stage.is_last, pulled, jnp.zeros_like(y))
    into_loss = as_varying(jnp.where(is_valid, 1.0, 0.0).astype(loss.dtype), loss)
    gradient, into_x = pull((into_y, into_loss))
    counted = jax.tree.map(lambda part: jnp.where(is_valid, part, jnp.zeros_like(part)), (loss, gradient, extra))
    return (
        total[0] + counted[0],
        jax.tree.map(jnp.add, total[1], counted[1]),
        combine(total[2], counted[2]),
    ), into_x


def _nothing(stage: _Stage, params: Tree, x: jax.Array) -> _Total:
    """Of the shapes and types of one micro-batch's part."""
    outputs = zeros_of(jax.eval_shape(stage.finish, params, x, jnp.int32(0)))
    loss, extra = jax.tree.map(lambda leaf: varying_over(leaf, ("stage",)), outputs)
    return loss, stage.pipeline.parallel.vary(_zero_sum(params)), extra


def _zero_sum(gradient: Tree) -> Tree:
    """What gradients add up to is float32, whatever type each has."""
    return jax.tree.map(lambda leaf: zeros_of(leaf, jnp.float32), gradient)


def _one_f_one_b(stage: _Stage, params: Tree, combine: Callable[[Tree, Tree], Tree]) -> _Total:
    """At tick t, stage s runs micro-batch t - s forward and t - 2 (S - 1) + s backward."""
    parallel, size = stage.pipeline.parallel, stage.size
    num_held = 2 * size - 1
    empty = stage.empty(params)
    Carry = tuple[jax.Array, jax.Array, jax.Array, _Total]  # from the previous stage, from the next, inputs held, total

    def forward(t: Any, carry: Carry) -> Carry:
        arrived, pulled, held, total = carry
        which = t - stage.number
        i = stage.clipped(which)
        x = stage.enter(params, arrived, i)
        held = jax.lax.dynamic_update_index_in_dim(held, x, jnp.mod(which, num_held), 0)
        # The last stage runs forward in its backward part, in the same tick.
        y = jax.lax.cond(stage.is_last, lambda: x, lambda: stage.pipeline.run(params, x, i))
        return parallel.to_next_stage(y), pulled, held, total

    def backward(t: Any, carry: Carry) -> Carry:
        arrived, pulled, held, total = carry
        which = t - 2 * (size - 1) + stage.number
        x = jax.lax.dynamic_index_in_dim(held, jnp.mod(which, num_held), 0, keepdims=False)
        total, into_x = _backward(stage, params, total, combine, which, x, pulled)
        return arrived, parallel.to_previous_stage(into_x), held, total

    held = parallel.vary(jnp.zeros((num_held, *empty.shape), empty.dtype))
    carry = (empty, empty, held, _nothing(stage, params, empty))
    first, last = size - 1, stage.count + size - 1
    carry = jax.lax.fori_loop(0, first, forward, carry)
    carry = jax.lax.fori_loop(first, last, lambda t, carry: backward(t, forward(t, carry)), carry)
    return jax.lax.fori_loop(last, last + size - 1, backward, carry)[3]


def _gpipe(stage: _Stage, params: Tree, combine: Callable[[Tree, Tree], Tree], max_count: int) -> _Total:
    """All forward, then all backward, the last micro-batch first."""
    parallel, size = stage.pipeline.parallel, stage.size
    empty = stage.empty(params)
    num_ticks = stage.count + size - 1

    def forward(t: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        arrived, held = carry
        which = t - stage.number
        i = stage.clipped(which)
        x = stage.enter(params, arrived, i)
        kept = jax.lax.dynamic_update_index_in_dim(held, x, i, 0)
        y = jax.lax.cond(stage.is_last, lambda: x, lambda: stage.pipeline.run(params, x, i))
        return parallel.to_next_stage(y), jnp.where(stage.valid(which), kept, held)

    def backward(t: Any, carry: tuple[jax.Array, _Total]) -> tuple[jax.Array, _Total]:
        pulled, total = carry
        which = stage.count - 1 - (t - (size - 1 - stage.number))
        x = jax.lax.dynamic_index_in_dim(held, stage.clipped(which), 0, keepdims=False)
        total, into_x = _backward(stage, params, total, combine, which, x, pulled)
        return parallel.to_previous_stage(into_x), total

    held = parallel.vary(jnp.zeros((max_count, *empty.shape), empty.dtype))
    _, held = jax.lax.fori_loop(0, num_ticks, forward, (empty, held))
    return jax.lax.fori_loop(0, num_ticks, backward, (empty, _nothing(stage, params, empty)))[1]

"""How much of the machine's matmul peak an update reaches, and what bounds it.

Model FLOPs are counted by hand: 2mnk per product, real tokens only, attention over the causal pairs of
each trajectory, the backward pass twice the forward, nothing for recomputation; the reference's
forward pass apart. The peak is a float32 product timed in the same process. The update's parts
(attention, projections and MLP, log-probability head, optimizer) are timed one by one over the same
windows; what they leave is the rest. It has no goal: the figure tells where the next second is to be won.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.benchmarks.figures import Goal, time_calls
from tests.benchmarks.workload import MODELS, agentic_lengths, count_parameters, make_trajectories, run_config
from tunix_core.config import ModelConfig, RunConfig
from tunix_core.data.packing import PackedArrays
from tunix_core.distributed.mesh import make_mesh
from tunix_core.distributed.peak import measure_peak_flops
from tunix_core.learner.train_step import make_optimizer, make_train_step
from tunix_core.models.attention import Scores, packed_mix
from tunix_core.models.decoder import Params, init_parameters, token_logprobs
from tunix_core.models.flops import attention_flops, product_flops
from tunix_core.models.layers import Setting, rotation
from tunix_core.models.parameters import block

PASSES = 4
"""Forward passes' worth of FLOPs: update 1 + 2, reference 1."""


class Flops(NamedTuple):
    """Of one forward pass over a batch."""

    dense: float
    """Projections and MLP."""
    attention: float
    head: float

    @property
    def total(self) -> float:
        return sum(self)


def forward_flops(model: ModelConfig, lengths: np.ndarray) -> Flops:
    num_tokens = int(lengths.sum())
    head = 2 * num_tokens * model.model_width * model.vocab_size
    return Flops(product_flops(model, num_tokens) - head, attention_flops(model, lengths), head)


def matmul_peak(seconds: float = 2.0) -> float:
    """FLOP/s of the best of a few square float32 products."""
    widths = 1024, 1536, 2048
    return max(measure_peak_flops(width=width, seconds=seconds / len(widths)) for width in widths)


NUM_CALLS = 2

Part = Callable[[PackedArrays], Any]
"""What one window costs in a part of the update."""


def _parts(config: RunConfig, params: Params, width: int) -> dict[str, Part]:
    """The update's parts over one window: forward and backward, and the reference's forward."""
    model = config.model
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    query = normal(1, width, model.num_heads, model.head_width)
    key, value = (normal(1, width, model.num_kv_heads, model.head_width) for _ in range(2))
    hidden = normal(1, width, model.model_width)

    scores = Scores(model.query_scale)

    def attention(operands: Any, window: PackedArrays) -> jax.Array:
        query, key, value = operands
        for _ in range(model.num_layers):  # each layer attends to what the one before made
            query = packed_mix(window.segment_ids, scores)(query, key, value)[0]
        return query.sum()

    def dense(operands: Any, window: PackedArrays) -> jax.Array:
        blocks, x = operands
        angles = rotation(window.positions, model)
        repeats = model.num_heads // model.num_kv_heads

        def mix(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, None]:
            return query + jnp.repeat(key + value, repeats, axis=2), None

        for layer in range(model.num_layers):
            x = block(model, jax.tree.map(lambda leaf, i=layer: leaf[i], blocks))(x, Setting(angles, mix))[0]
        return x.sum()

    def head(operands: Any, window: PackedArrays) -> jax.Array:
        matrix, x = operands
        return token_logprobs({"head": matrix}, model, x, window.tokens, 1.0)[0].sum()

    def both(function: Callable[[Any, PackedArrays], jax.Array], operands: Any) -> Part:
        update = jax.jit(jax.grad(function))
        reference = jax.jit(function)
        return lambda window: jax.block_until_ready((update(operands, window), reference(operands, window)))

    return {
        "attention": both(attention, (query, key, value)),
        "projections and MLP": both(dense, (params["blocks"], hidden)),
        "log-probability head": both(head, (params["head"], hidden)),
    }


def _optimizer_seconds(config: RunConfig, params: Params, seconds: float) -> float:
    optimizer = optax.with_extra_args_support(make_optimizer(config.optimizer))
    state = jax.jit(optimizer.init)(params)

    def change(gradient: Params, state: Any) -> tuple[Any, Any]:
        return optimizer.update(gradient, state, gradient, global_norm=optax.tree.norm(gradient))

    update = jax.jit(change)
    return time_calls(lambda: jax.block_until_ready(update(params, state)), seconds=seconds).median


def measure_model(name: str, num_trajectories: int, peak: float, seconds: float) -> dict[str, Any]:
    """`seconds` per timed thing, at least `NUM_CALLS` calls of each."""
    model = MODELS[name]
    config = run_config(model, num_trajectories)
    trajectories = make_trajectories(agentic_lengths(num_trajectories, 0), model.vocab_size, 0)
    arrays = trajectories.pack(trajectories.fit())
    params = init_parameters(model, 0)
    step = make_train_step(config, make_mesh(config.mesh))
    step.compile(len(arrays.tokens))
    batch, reference = step.put(arrays), step.put_reference(init_parameters(model, 1))
    states = [step.init_state(params)]

    def update() -> None:
        state, metrics = step(states.pop(), reference, batch, float(arrays.loss_mask.sum()))
        states.append(state)
        float(metrics["loss"])

    taken = time_calls(update, seconds=seconds, at_least=NUM_CALLS)
    windows = [jax.tree.map(lambda array, i=i: array[i : i + 1], arrays) for i in range(len(arrays.tokens))]
    parts = {
        part: time_calls(
            lambda run=run: [run(window) for window in windows], seconds=seconds, at_least=NUM_CALLS
        ).median
        for part, run in _parts(config, params, arrays.tokens.shape[1]).items()
    }
    parts["optimizer"] = _optimizer_seconds(config, params, seconds / 2)
    flops = forward_flops(model, trajectories.lengths)
    of_parts = {
        "attention": flops.attention,
        "projections and MLP": flops.dense,
        "log-probability head": flops.head,
    }
    return {
        "model": name,
        "num_parameters": count_parameters(model),
        "num_tokens": trajectories.num_tokens,
        "seconds": taken,
        "update_flops": (PASSES - 1) * flops.total,
        "reference_flops": flops.total,
        "utilisation": PASSES * flops.total / taken.median / peak,
        "utilisation_without_reference": (PASSES - 1) * flops.total / taken.median / peak,
        "parts": parts,
        "parts_of_peak": {part: PASSES * work / parts[part] / peak for part, work in of_parts.items()},
    }


def bound(figures: dict[str, Any]) -> str:
    """The part that takes longest, in words."""
    whole, parts = figures["seconds"].median, figures["parts"]
    longest = max(parts, key=parts.__getitem__)
    reached = figures["parts_of_peak"].get(longest)
    at = f", at {reached:.0%} of the matmul peak" if reached is not None else ", which multiplies nothing"
    return f"bound by {longest}: {parts[longest] / whole:.0%} of the update{at}"


def measure(*, quick: bool) -> tuple[dict[str, Any], list[Goal]]:
    peak = matmul_peak()
    # The larger model takes minutes on two cores.
    cases = [("4.5M", 14, 3.0)] if quick else [("4.5M", 28, 20.0), ("34M", 14, 30.0)]
    models = [measure_model(name, num, peak, seconds) for name, num, seconds in cases]
    return {"matmul_peak_flops_per_second": peak, "models": models}, []


def report(figures: dict[str, Any]) -> None:
    peak = figures["matmul_peak_flops_per_second"]
    print(f"\nUtilisation of the float32 matmul peak, {peak / 1e9:.0f} GFLOP/s here")
    for model in figures["models"]:
        whole = model["seconds"].median
        print(
            f"{model['model']} ({model['num_parameters']:,} parameters), {model['num_tokens']} tokens: "
            f"{model['seconds']:.2f} s, {model['utilisation']:.1%} of the peak "
            f"(update {model['update_flops'] / 1e9:.0f} GFLOP, reference {model['reference_flops'] / 1e9:.0f} GFLOP)"
        )
        parts = model["parts"]
        for part, seconds in {**parts, "rest": whole - sum(parts.values())}.items():
            reached = model["parts_of_peak"].get(part)
            print(
                f"  {part:22}{seconds:>8.2f} s{seconds / whole:>7.0%}" + (f"{reached:>8.1%} of peak" if reached else "")
            )
        print(f"  {bound(model)}")

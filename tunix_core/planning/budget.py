"""Bytes of a device's HBM, counted from shapes: exact for what lies there between steps, an estimate for the rest.

The estimate serves to search and to advise; what a plan says in the end is the compiler's figure.
Shapes: B windows of a micro-batch, T tokens, D model width, H, K, E heads, kv heads, head width, F MLP width.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
import optax

from tunix_core.config import RunConfig
from tunix_core.distributed.parallel import Parallel
from tunix_core.learner import value_head
from tunix_core.learner.train_step import make_optimizer
from tunix_core.model_config import ModelConfig
from tunix_core.models.decoder import default_chunk_tokens
from tunix_core.models.flops import layer_elements
from tunix_core.models.parameters import Params, abstract_parameters, trained_parameters
from tunix_core.models.partitioning import as_differentiated, as_used, partition_specs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes of one device."""

    parameters: int
    optimizer: int
    reference: int
    batch: int
    gradients: int
    """Their sum in float32, and those of a micro-batch as the weights are used."""
    casts: int
    """Trained weights as they are used, where that is not as they are kept."""
    activations: int
    """What the backward pass finds, the layer at work, gathered weights, chunks of logits, inputs held for a schedule."""

    @property
    def total(self) -> int:
        return sum(dataclasses.asdict(self).values())

    @property
    def lasting(self) -> int:
        """What lies there between steps too."""
        return self.parameters + self.optimizer + self.reference + self.batch

    @property
    def largest(self) -> str:
        parts = dataclasses.asdict(self)
        return max(parts, key=lambda name: parts[name])


def num_microbatches(config: RunConfig) -> int:
    """Of the largest batch, which the learner compiles for; on each data shard."""
    return config.max_microbatches(config.learner.window_tokens)


def num_windows(config: RunConfig) -> int:
    """Of that batch, over all data shards."""
    return num_microbatches(config) * config.microbatch_windows


def _bytes(parallel: Parallel, leaf: Any, spec: Any = ()) -> int:
    parts = math.prod(getattr(parallel, axis) for axis in spec if axis)
    return leaf.size * np.dtype(leaf.dtype).itemsize // parts


def _tree_bytes(tree: Any, parallel: Parallel) -> int:
    return sum(
        jax.tree.leaves(jax.tree.map(functools.partial(_bytes, parallel), tree, partition_specs(tree, parallel)))
    )


@functools.lru_cache(maxsize=64)
def _shapes(config: RunConfig) -> tuple[Params, Any, Params]:
    """What is trained, its optimizer's state, and the reference."""
    trained = trained_parameters(config.model)
    if config.algorithm.has_value_head:
        trained = value_head.attached(trained, value_head.fresh(config.model))
    state = jax.eval_shape(make_optimizer(config.optimizer).init, trained)
    return trained, state, as_used(abstract_parameters(config.model.base()), config.model.compute_dtype)


def budget(config: RunConfig) -> Budget:
    """Of a step of reinforcement learning, on the device that holds most."""
    parallel = Parallel(**config.mesh.sizes)
    plain = dataclasses.replace(config, mesh=type(config.mesh)())
    trained, state, reference = _shapes(plain)
    of_optimizer = optax.tree_utils.tree_map_params(
        make_optimizer(config.optimizer),
        functools.partial(_bytes, parallel),
        state,
        partition_specs(trained, parallel),
        transform_non_params=functools.partial(_bytes, parallel),
    )
    parameters = _tree_bytes(trained, parallel)
    used = as_differentiated(trained, config.model.compute_dtype)
    return Budget(
        parameters=parameters,
        optimizer=sum(jax.tree.leaves(of_optimizer)),
        reference=_tree_bytes(reference, parallel),
        batch=_batch_bytes(config),
        gradients=parameters + _tree_bytes(used, parallel),
        casts=_tree_bytes(jax.tree.map(_if_cast, used), parallel),
        activations=_activation_bytes(config, parallel),
    )


def _if_cast(leaf: Any) -> Any:
    """The leaf, or one of no elements where it is used as it is kept."""
    return leaf if leaf.dtype != np.float32 else jax.ShapeDtypeStruct((0,) * leaf.ndim, leaf.dtype)


def _batch_bytes(config: RunConfig) -> int:
    tokens = num_microbatches(config) * config.learner.windows_per_microbatch * config.learner.window_tokens
    arrays = 6 * 4 + 2 * 1 + 4 * config.algorithm.has_value_head
    kept = 2 * 4 * (1 + (config.learner.updates_per_batch > 1))  # log probabilities and entropy
    return tokens * (arrays + kept)


def _activation_bytes(config: RunConfig, parallel: Parallel) -> int:
    """At the backward pass of a micro-batch, where they are most."""
    model, tensor = config.model, parallel.tensor
    width = np.dtype(model.compute_dtype).itemsize
    tokens = config.learner.windows_per_microbatch * config.learner.window_tokens
    stream = tokens * model.model_width * width // tensor
    num_layers = model.num_layers // parallel.stage
    of_layer = _layer_activations(model, tokens, tensor) * width
    kept = {"layer": stream, "matmuls": stream + of_layer, "none": stream + of_layer}[model.remat]
    held = 0
    if parallel.stage > 1:
        held = num_microbatches(config) if config.mesh.schedule == "gpipe" else 2 * parallel.stage - 1
    chunk = min(model.logprob_chunk_tokens or default_chunk_tokens(model.vocab_size), tokens)
    logits = 3 * 4 * chunk * model.vocab_size // tensor
    hidden = 3 * tokens * model.model_width * width  # before the head, whole along tensor, and its gradient
    head = _gathered(model.vocab_size * model.model_width // tensor, parallel, width) + hidden + logits
    layer = 2 * of_layer + _gathered(layer_elements(model, max(1, model.num_experts)) // tensor, parallel, width)
    return num_layers * kept + held * stream + max(head, layer)


def _gathered(num_elements: int, parallel: Parallel, width: int) -> int:
    """A weight in the compute type, whole, and its gradient."""
    return num_elements * width * (3 if parallel.fsdp > 1 else 2)


def _layer_activations(model: ModelConfig, tokens: int, tensor: int) -> int:
    """Elements that a layer's backward pass reads: normed inputs and partial sums whole, heads and columns in parts."""
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_width
    columns = 3 * model.mlp_width * max(1, model.experts_per_token)
    return tokens * (4 * model.model_width + (heads + columns + 2 * model.model_width) // tensor)

"""The decoder as pure functions over a plain pytree of parameters.

Flax NNX (`layers`) declares the parameters; `nnx.split` runs once per configuration, abstractly,
and everything below merges at trace time, so a compiled function takes nested dicts of arrays and
dispatches at the price of a pytree. Layers are stacked: each leaf under `blocks` leads with L.

The cached path is in `cache`; both run the same `Block`.

Shapes: B windows, T tokens, D model width, V vocabulary, L layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from tunix_core.distributed.compilation import QUICK_ON_CPU
from tunix_core.errors import DataError
from tunix_core.model_config import ModelConfig
from tunix_core.models.layers import Block, Decoder, RMSNorm

Params = dict[str, Any]
"""Nested dict of float32 arrays."""


ADAPTER = ("lora_a", "lora_b")
"""The leaves that adapters add to a projection."""


@functools.lru_cache(maxsize=16)
def _definitions(config: ModelConfig) -> tuple[Any, Any, Params]:
    """Graph definitions of one block and of the final norm, and the abstract parameters."""
    abstract = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
    layer = nnx.split(abstract.blocks, nnx.Param)[0]
    norm = nnx.split(abstract.final_norm, nnx.Param)[0]
    return layer, norm, nnx.to_pure_dict(nnx.split(abstract, nnx.Param)[1])


def block(config: ModelConfig, layer: Params) -> Block:
    """The module of one layer around its parameters (no leading L axis)."""
    return nnx.merge(_definitions(config)[0], layer)


def final_norm(config: ModelConfig, params: Params) -> RMSNorm:
    """The module of the norm before the head."""
    return nnx.merge(_definitions(config)[1], params["final_norm"])


def abstract_parameters(config: ModelConfig) -> Params:
    """Shapes and types of the parameters, nothing allocated."""
    return _definitions(config)[2]


def _initialise(config: ModelConfig, key: jax.Array) -> Params:
    return nnx.to_pure_dict(nnx.split(Decoder(config, nnx.Rngs(key)), nnx.Param)[1])


@functools.lru_cache(maxsize=1)
def _compiled_initialise() -> Callable[[ModelConfig, jax.Array], Params]:
    """On CPU without optimisation: it runs once, and optimising its many draws takes six times as long."""
    on_cpu = jax.default_backend() == "cpu"
    return jax.jit(_initialise, static_argnums=0, compiler_options=QUICK_ON_CPU if on_cpu else None)


def adapters(params: Params) -> Params:
    """The adapters of an adapted model alone: what is trained and published."""
    return _chosen(params, lambda name: name in ADAPTER)


def base_parameters(params: Params) -> Params:
    """An adapted model without its adapters."""
    return _chosen(params, lambda name: name not in ADAPTER)


def _chosen(params: Params, wanted: Callable[[str], bool]) -> Params:
    kept = {}
    for name, value in params.items():
        if isinstance(value, dict):
            if inner := _chosen(value, wanted):
                kept[name] = inner
        elif wanted(name):
            kept[name] = value
    return kept


def combined(base: Params, added: Params) -> Params:
    """The two trees as one, stacked or by layer; they share no leaf. Nothing is copied."""
    both = dict(base)
    for name, value in added.items():
        if name not in both:
            both[name] = value
        elif isinstance(value, tuple):
            both[name] = tuple(combined(*pair) for pair in zip(both[name], value, strict=True))
        else:
            both[name] = combined(both[name], value)
    return both


def trained_parameters(config: ModelConfig) -> Params:
    """Shapes and types of what training changes: everything, or the adapters."""
    params = abstract_parameters(config)
    return adapters(params) if config.lora_rank else params


def adapted(config: ModelConfig, trained: Params, base: Params | None) -> Params:
    """The whole model: what is trained, on the frozen base where it is adapters."""
    if not config.lora_rank:
        return trained
    assert base is not None, "adapters lie on a base"
    return combined(base, trained)


def init_parameters(config: ModelConfig, seed: int) -> Params:
    """Fresh parameters: normal(0.02), residual outputs divided by sqrt(2 L), norms one."""
    return _compiled_initialise()(config, jax.random.key(seed))


def named_leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted name -> leaf, sorted by name."""
    found = {}
    for name in sorted(tree):
        value = tree[name]
        if isinstance(value, Mapping):
            found.update(named_leaves(value, f"{prefix}{name}."))
        else:
            found[prefix + name] = value
    return found


def flatten_parameters(params: Params) -> dict[str, np.ndarray]:
    """Dotted name -> array on the host, sorted by name: what a policy file holds."""
    return {name: np.asarray(leaf) for name, leaf in named_leaves(jax.device_get(params)).items()}


def unflatten_parameters(
    config: ModelConfig, tensors: Mapping[str, Any], expected_parameters: Params | None = None
) -> Params:
    """The inverse of `flatten_parameters`, checked against the configuration.

    Args:
        tensors: arrays, or what has their shape and type; they become the leaves as they are.
        expected_parameters: a part of the model's, such as `trained_parameters`; None: all of them.

    Raises:
        DataError: a tensor is missing, surplus, of another shape or type.
    """
    expected = named_leaves(expected_parameters or abstract_parameters(config))
    missing, surplus = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or surplus:
        raise DataError(
            f"parameters: missing {missing or 'none'}, surplus {surplus or 'none'}; "
            "accepted exactly the tensors of the run's model section. Load the policy with the configuration it was saved with."
        )
    params: Params = {}
    for name, leaf in expected.items():
        tensor = tensors[name]
        if tensor.shape != leaf.shape or tensor.dtype != leaf.dtype:
            raise DataError(
                f"parameters.{name}: received {tensor.dtype}{list(tensor.shape)}, accepted {leaf.dtype}{list(leaf.shape)}. "
                "Load the policy with the configuration it was saved with."
            )
        *parents, last = name.split(".")
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = tensor
    return params

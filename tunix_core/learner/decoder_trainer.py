"""The trainer of the decoder: `train_step` behind the loop's protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tunix_core.config import RunConfig
from tunix_core.data.packing import PackedArrays
from tunix_core.distributed.hosts import share_of
from tunix_core.distributed.mesh import make_mesh
from tunix_core.errors import CorruptObject
from tunix_core.learner.train_step import make_train_step
from tunix_core.learner.trainer import check_leaves
from tunix_core.learner.update import PlacedBatch, TrainState
from tunix_core.learner.value_head import detached
from tunix_core.models.parameters import Params, named_leaves, trained_parameters, unflatten_parameters
from tunix_core.storage.parts import Part, Parts, Tensors


class DecoderTrainer:
    """See `trainer.Trainer`."""

    def __init__(self, config: RunConfig, mesh: Mesh | None = None) -> None:
        """
        Args:
            mesh: as `config.mesh` says; None: over all devices.
        """
        self._config = config
        mesh = make_mesh(config.mesh) if mesh is None else mesh
        self.share = share_of(mesh)
        """This host's of every batch."""
        self._step = make_train_step(config, mesh)

    def initial_state(self, tensors: Tensors) -> TrainState:
        model = self._config.model
        return self._step.init_state(unflatten_parameters(model, tensors, trained_parameters(model)))

    def reference(self, tensors: Tensors) -> Params:
        return self._step.put_reference(unflatten_parameters(self._config.model.base(), tensors))

    def compile(self, num_windows: int, window_tokens: int) -> None:
        self._step.compile(num_windows, window_tokens)

    def put(self, arrays: PackedArrays) -> PlacedBatch:
        return self._step.put(arrays)

    def step(
        self, state: TrainState, reference: Params, batch: PlacedBatch, denominator: np.ndarray
    ) -> tuple[TrainState, Mapping[str, Any]]:
        return self._step(state, reference, batch, denominator)

    def tensors(self, state: TrainState) -> dict[str, np.ndarray | Parts]:
        return {name: _host_copy(value) for name, value in named_leaves(detached(state.params)).items()}

    def to_host(self, state: TrainState) -> dict[str, np.ndarray | Parts]:
        return {name: _host_copy(value) for name, value in _named_leaves(state).items()}

    def from_host(self, arrays: Tensors) -> TrainState:
        abstract = self._step.abstract_state()
        expected = _named_leaves(abstract)
        if faults := check_leaves(expected, arrays):
            raise CorruptObject(
                f"checkpoint: {'; '.join(faults[:5])}. Restore it with the configuration it was saved with."
            )
        leaves = [arrays[name] for name in expected]
        return self._step.put_state(jax.tree.unflatten(jax.tree.structure(abstract), leaves))


def _host_copy(array: jax.Array) -> np.ndarray | Parts:
    """Of several hosts each copies the parts that it holds; what lies on more than one device, one of them copies."""
    # On CPU an array on the host may be a view of the device's, which the next step gives away.
    if array.is_fully_addressable:
        return np.array(array)
    parts = []
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            offset = tuple(s.start or 0 for s in shard.index)
            parts.append(Part.of(np.array(shard.data), offset))
    return Parts(array.shape, array.dtype, parts)


def _named_leaves(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}

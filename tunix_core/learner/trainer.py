"""What the loop needs to know of the model: a protocol, and the one that trains the decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tunix_core.data.packing import PackedArrays
from tunix_core.storage.parts import Tensors

State = Any
"""A pytree of device arrays: parameters, optimizer state, step."""


class Trainer(Protocol):
    """Owns no state: it maps states to states."""

    def initial_state(self, tensors: Tensors) -> State:
        """Fresh optimizer around the named weights."""

    def reference(self, tensors: Tensors) -> Any:
        """The weights of the KL reference on the device."""

    def compile(self, num_windows: int, window_tokens: int) -> None:
        """Make the executable for batches of at most so many windows of that size; others are refused later."""

    def put(self, arrays: PackedArrays) -> Any:
        """Onto the devices, as the compiled step takes it; of several hosts each puts its own windows on its own."""

    def step(
        self, state: State, reference: Any, batch: Any, denominator: np.ndarray
    ) -> tuple[State, Mapping[str, Any]]:
        """The updates of one batch; gives up `state`.

        Args:
            denominator: float32 [K], of each update.

        Returns:
            The new state and scalars, of which `nonfinite` counts the updates that were skipped.
        """

    def tensors(self, state: State) -> Tensors:
        """Host copies of the weights, by their published names; of several hosts each copies its parts."""

    def to_host(self, state: State) -> Tensors:
        """The same of the whole state, by names that stay the same between releases of the optimizer."""

    def from_host(self, arrays: Tensors) -> State:
        """The inverse of `to_host`.

        Raises:
            CorruptObject: a leaf is missing, surplus or of another shape.
        """


def check_leaves(expected: Mapping[str, Any], received: Tensors) -> Sequence[str]:
    """Differences between the leaves of a state and those of a checkpoint, as texts."""
    faults = [f"{name}: missing" for name in expected if name not in received]
    faults += [f"{name}: unknown" for name in received if name not in expected]
    for name in expected:
        if name in received:
            shape, dtype = tuple(expected[name].shape), np.dtype(expected[name].dtype)
            found = received[name]
            if (found.shape, found.dtype) != (shape, dtype):
                faults.append(f"{name}: received {found.dtype}{list(found.shape)}, accepted {dtype}{list(shape)}")
    return faults

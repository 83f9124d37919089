"""The learner's device mesh, and what it must divide."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from tunix_core.errors import ConfigError
from tunix_core.model_config import ModelConfig
from tunix_core.validation import require, require_choice, require_range

AXES = ("data", "fsdp", "stage", "tensor")

Schedule = Literal["1f1b", "gpipe"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices per mesh axis; their product must equal the learner's device count.

    `data` and `fsdp` split windows; `fsdp` also parameters and optimizer; `stage` the layers; `tensor` heads,
    MLP and vocabulary. Put `tensor` inside a host's fast links.
    """

    data: int = 1
    fsdp: int = 1
    stage: int = 1
    tensor: int = 1
    schedule: Schedule = "1f1b"
    """Of micro-batches through the stages, where there are several. 1f1b holds the inputs of at most 2 stage - 1 of them,
    gpipe of all."""

    def __post_init__(self) -> None:
        for axis, devices in self.sizes.items():
            require_range(f"mesh.{axis}", devices, 1)
        require_choice("mesh.schedule", self.schedule, Schedule)
        require(
            self.schedule == "1f1b" or self.stage > 1,
            "mesh.schedule",
            self.schedule,
            "1f1b (the default) without stages",
            "There is nothing to schedule: set mesh.stage above 1, or leave it out.",
        )

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> devices, in the mesh's order."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def num_window_shards(self) -> int:
        """Parts that a batch's windows are split into."""
        return self.data * self.fsdp

    def check(self, model: ModelConfig, window_tokens: int, field: str = "learner.window_tokens") -> None:
        """
        Args:
            field: where the size of windows comes from.

        Raises:
            ConfigError: an axis does not divide what it splits.
        """
        split = {
            "tensor": {
                "model.num_heads": model.num_heads,
                "model.num_kv_heads": model.num_kv_heads,
                "model.mlp_width": model.mlp_width,
                "model.vocab_size": model.vocab_size,
                field: window_tokens,
            },
            "fsdp": {"model.model_width": model.model_width},
            "stage": {"model.num_layers": model.num_layers},
        }
        for axis, fields in split.items():
            devices = getattr(self, axis)
            for split_field, size in fields.items():
                if size % devices:
                    divisors = [str(n) for n in range(1, size + 1) if size % n == 0]
                    shown = ", ".join(divisors[:12]) + (", …" if len(divisors) > 12 else "")
                    raise ConfigError(
                        f"mesh.{axis}",
                        devices,
                        f"a divisor of {split_field} = {size}, which it splits: {shown}",
                        "Choose one, and give the other devices to another axis.",
                    )

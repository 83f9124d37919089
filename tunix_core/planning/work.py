"""Operations of a step, traffic between devices and the pipeline's bubble, from shapes; a rate from a data sheet.

The time is no forecast: operations at the peak rate stretched by the bubble, plus traffic at the rate of all links, with
nothing overlapped. It orders meshes.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tunix_core.config import RunConfig
from tunix_core.models.flops import (
    adapter_elements,
    attention_flops,
    layer_elements,
    product_flops,
    reference_flops,
    update_flops,
)
from tunix_core.planning.budget import num_microbatches, num_windows
from tunix_core.planning.chips import Chip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Of one batch, all devices together unless it says otherwise."""

    model_flops: int
    """Forward and backward, by PaLM's convention (`models.flops`)."""
    reference_flops: int
    executed_flops: int
    """With what the step computes again, and its passes for the reference and the proximal policy."""
    sent_bytes: dict[str, int]
    """By mesh axis, of one device."""
    num_microbatches: int
    bubble: float
    """Share of a batch's time in which a stage waits."""

    def seconds(self, chip: Chip, num_devices: int) -> float:
        """See the module: it orders meshes."""
        compute = self.executed_flops / num_devices / chip.peak_flops / (1 - self.bubble)
        return compute + sum(self.sent_bytes.values()) / chip.send_bytes_per_second


def work(config: RunConfig, segment_tokens: int = 0) -> Work:
    """
    Args:
        segment_tokens: of a trajectory; windows are full of such. 0: one as long as its window, the most attention.
    """
    length = min(segment_tokens or config.learner.window_tokens, config.learner.window_tokens)
    per_window, rest = divmod(config.learner.window_tokens, length)
    lengths = np.array([length] * per_window + ([rest] if rest else []), np.int64)
    lengths = np.tile(lengths, num_windows(config))
    model, stages = config.model, config.mesh.stage
    num_tokens = int(lengths.sum())
    forward = product_flops(model, num_tokens) + attention_flops(model, lengths)
    head = 2 * num_tokens * model.model_width * model.vocab_size
    of_layers = forward - head
    again = {"none": 0, "matmuls": attention_flops(model, lengths), "layer": of_layers}[model.remat]
    own = update_flops(model, lengths)
    reference = reference_flops(model, lengths)
    several = config.learner.updates_per_batch > 1
    per_update = num_microbatches(config) // config.learner.updates_per_batch
    return Work(
        model_flops=own,
        reference_flops=reference,
        executed_flops=own + reference + again + head + (of_layers if stages > 1 else 0) + (forward if several else 0),
        sent_bytes=_traffic(config),
        num_microbatches=num_microbatches(config),
        bubble=(stages - 1) / (max(1, per_update) + stages - 1),
    )


def _traffic(config: RunConfig) -> dict[str, int]:
    """What a device sends along each axis."""
    model, mesh = config.model, config.mesh
    count, width = num_microbatches(config), np.dtype(model.compute_dtype).itemsize
    tokens = config.learner.windows_per_microbatch * config.learner.window_tokens
    num_layers = model.num_layers // mesh.stage
    stream = tokens * model.model_width * width
    passes = 1 + (config.learner.updates_per_batch > 1)  # of the reference and the start, forward only
    forward = passes + 1 + (mesh.stage > 1) + (model.remat == "layer")
    backward = 1
    layer = layer_elements(model, max(1, model.num_experts))
    weights = num_layers * layer + 2 * model.vocab_size * model.model_width
    whole = weights * width // mesh.tensor
    sent = {
        "fsdp": (forward + backward) * count * whole * (mesh.fsdp - 1) // mesh.fsdp,
        # Two gathers; two sums of which each device keeps its part, which the compiler makes all-reduces.
        "tensor": (forward + backward) * count * num_layers * (2 + 2 * 2) * stream * (mesh.tensor - 1) // mesh.tensor,
        "stage": (2 + passes) * count * stream // mesh.tensor if mesh.stage > 1 else 0,
        "data": 2 * 4 * (whole // width) // mesh.fsdp * (mesh.data - 1) // mesh.data,
    }
    if model.lora_rank:
        sent["data"] = 2 * 4 * num_layers * adapter_elements(model) * (mesh.data - 1) // mesh.data
    return {axis: amount for axis, amount in sent.items() if amount}

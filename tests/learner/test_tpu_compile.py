"""The learner's own step, compiled by the TPU compiler for a TPU that is only described: no chip, nothing executed.

`make tpu-plans` installs libtpu for it. Meshes of all axes are in `tests/planning/test_tpu_plans.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tunix_core.config_loading import config_from_dict
from tunix_core.planning.chips import parse_topology
from tunix_core.planning.compiling import Compiled, compile_for

SHAPE = {"vocab_size": 512, "model_width": 256, "num_layers": 6, "num_heads": 4, "num_kv_heads": 2, "head_width": 128}


def compiled(**model: Any) -> Compiled:
    values = {
        "recipe": "tpu",
        "model": {**SHAPE, "mlp_width": 512, "compute_dtype": "bfloat16", "remat": "layer", **model},
        "mesh": {"data": 4},
        "learner": {"window_tokens": 2048, "windows_per_microbatch": 1, "max_windows": 8},
    }
    return compile_for(config_from_dict(values), parse_topology("v5e:2x2"))


@pytest.mark.tpu
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"sliding_window": 256, "sliding_period": 2, "attention_softcap": 50.0, "logit_softcap": 30.0},
        {"head_width": 64, "query_key_norm": True, "tied_embeddings": True},
    ],
    ids=["llama", "gemma2", "qwen3"],
)
def test_the_step_compiles_with_the_kernels(model: dict[str, Any]) -> None:
    """Policy forward, its recomputation and the reference's forward, and two backward kernels: in rolled layers, one each."""
    assert compiled(**model).num_kernels >= 5


@pytest.mark.tpu
def test_kernels_hold_no_square_of_the_window() -> None:
    with_kernels = compiled()
    dense = compiled(attention="dense")
    assert dense.num_kernels == 0
    assert with_kernels.temporary_bytes < dense.temporary_bytes / 2

"""The learner's own step, compiled by the TPU compiler for a TPU that is only described: no chip, nothing executed.

`make tpu-plans` installs libtpu for it; in a process of its own, since libtpu reads its environment once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}

PROGRAM = """
import json, sys
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh
from tunix_core.config_loading import (config_from_dict)
from tunix_core.learner.train_step import make_train_step

values = json.loads(sys.argv[1])
config = config_from_dict({"recipe": "tpu", **values})
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
mesh = Mesh(np.array(devices).reshape(4, 1), ("data", "fsdp"))
step = make_train_step(config, mesh)
executable = step.lower(8).compile()
text, memory = executable.as_text(), executable.memory_analysis()
print(json.dumps({
    "kernels": text.count('custom_call_target="tpu_custom_call"'),
    "temporary_bytes": memory.temp_size_in_bytes,
}))
"""

SHAPE = {"vocab_size": 512, "model_width": 256, "num_layers": 6, "num_heads": 4, "num_kv_heads": 2, "head_width": 128}


def compiled(**model: Any) -> dict[str, Any]:
    values = {
        "model": {**SHAPE, "mlp_width": 512, "compute_dtype": "bfloat16", "remat": "layer", **model},
        "mesh": {"data": 4},
        "learner": {"window_tokens": 2048, "windows_per_microbatch": 1, "max_windows": 8},
    }
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(values)],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


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
    found = compiled(**model)
    assert found["kernels"] >= 5


@pytest.mark.tpu
def test_kernels_hold_no_square_of_the_window() -> None:
    with_kernels = compiled()
    dense = compiled(attention="dense")
    assert dense["kernels"] == 0
    assert with_kernels["temporary_bytes"] < dense["temporary_bytes"] / 2

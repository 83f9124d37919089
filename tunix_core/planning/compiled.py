"""Compiles a run's step for a described TPU and says what came of it; a process of its own, in libtpu's environment.

`python -m tunix_core.planning.compiled` reads a request from standard input (see `compiling`) and writes a line of JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from tunix_core.config import RunConfig
from tunix_core.config_loading import config_from_dict
from tunix_core.distributed.mesh import make_mesh
from tunix_core.learner.train_step import make_train_step
from tunix_core.planning.budget import num_windows
from tunix_core.planning.gathers import misplaced
from tunix_core.planning.hlo import collectives

KERNEL = 'custom_call_target="tpu_custom_call"'


def compile_step(config: RunConfig, topology: str, num_slices: int, text_file: str = "") -> dict[str, Any]:
    """Memory, collectives and kernels of the executable, or the compiler's refusal.

    Args:
        text_file: where to put the compiled program; empty: nowhere.
    """
    slices = {"num_slices": num_slices} if num_slices > 1 else {}
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **slices)
    step = make_train_step(config, make_mesh(config.mesh, described.devices))
    lowered = step.lower(num_windows(config))
    try:
        executable = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return {"refusal": str(error)}
    memory = executable.memory_analysis()
    text = executable.as_text()
    if text_file:
        Path(text_file).write_text(text)
    found = collectives(text, config.mesh.sizes)
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "program_bytes": memory.generated_code_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "num_kernels": text.count(KERNEL),
        "collectives": found,
        "misplaced": misplaced(config, found),
    }


def main() -> None:
    request = json.load(sys.stdin)
    began = time.monotonic()
    found = compile_step(config_from_dict(request.pop("config")), **request)
    used = resource.getrusage(resource.RUSAGE_SELF)
    found["wall_seconds"] = time.monotonic() - began
    found["cpu_seconds"] = used.ru_utime + used.ru_stime
    found["host_bytes"] = used.ru_maxrss * 1024
    print(json.dumps(found))


if __name__ == "__main__":
    main()

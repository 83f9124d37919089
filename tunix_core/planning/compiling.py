"""Asks for a step to be compiled: in a child process, so that libtpu and its environment touch nobody else."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tunix_core.config import RunConfig
from tunix_core.config_loading import config_to_dict
from tunix_core.errors import CompilationFailed
from tunix_core.planning.chips import Topology
from tunix_core.planning.hlo import Array, Collective
from tunix_core.validation import require_package

# Without the third a second process dies on a lock file; the last three keep libtpu from asking for a metadata server.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}

_REFUSALS = (
    re.compile(r"Used ([\d.]+[KMGT]) of ([\d.]+[KMGT]) hbm"),
    # What it calls temporaries includes arguments and results.
    re.compile(r"required for HLO temporaries \(([\d.]+[KMGT])\) exceeds available HBM \(([\d.]+[KMGT])\)"),
)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler says of a device's program."""

    peak_bytes: int
    """Of what is in HBM at once."""
    limit_bytes: int = 0
    """What the compiler may use of HBM, where it refused; 0: it did not say."""
    argument_bytes: int = 0
    temporary_bytes: int = 0
    program_bytes: int = 0
    num_kernels: int = 0
    collectives: tuple[Collective, ...] = ()
    misplaced: tuple[str, ...] = ()
    """Gathers of whole parameters, see `gathers`."""
    wall_seconds: float
    cpu_seconds: float
    host_bytes: int

    @property
    def refused(self) -> bool:
        return self.limit_bytes > 0


def compile_for(config: RunConfig, topology: Topology, text_file: Path | None = None) -> Compiled:
    """The run's own train step, at the largest batch that its learner would compile.

    Args:
        text_file: where to put the compiled program (HLO).

    Raises:
        ConfigError: libtpu is not installed.
        CompilationFailed: anything but an executable or a refusal for memory.
    """
    require_package("libtpu", "tpu")
    request = {"config": config_to_dict(config), "topology": topology.name, "num_slices": topology.num_slices}
    if text_file is not None:
        request["text_file"] = str(text_file)
    done = subprocess.run(
        [sys.executable, "-m", "tunix_core.planning.compiled"],
        input=json.dumps(request),
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CompilationFailed(
            f"{topology.name}: the compiler's process ended with {done.returncode}:\n{done.stderr[-3000:]}"
        )
    return read_answer(done.stdout.splitlines()[-1])


def read_answer(line: str) -> Compiled:
    """Of the child's one line.

    Raises:
        CompilationFailed: it was refused for another reason than memory.
    """
    answer = json.loads(line)
    if "refusal" in answer:
        peak, limit = _refused(answer.pop("refusal"))
        return Compiled(peak_bytes=peak, limit_bytes=limit, **answer)
    found = tuple(
        Collective(kind, tuple(axes), tuple(Array(dtype, tuple(shape)) for dtype, shape in results), *rest)
        for kind, axes, results, *rest in answer.pop("collectives")
    )
    return Compiled(collectives=found, misplaced=tuple(answer.pop("misplaced")), **answer)


def _refused(message: str) -> tuple[int, int]:
    """Bytes that it needs, and may use."""
    for pattern in _REFUSALS:
        if found := pattern.search(message):
            return _amount(found[1]), _amount(found[2])
    raise CompilationFailed(f"the compiler refused the step: {message[:3000]}")


def _amount(text: str) -> int:
    return int(float(text[:-1]) * _UNITS[text[-1]])

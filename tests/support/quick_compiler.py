"""XLA flags for programs of tests, which run a few times: quick to compile, without optimisation."""

import jaxlib.version

from tunix_core.distributed.compilation import QUICK_ON_CPU

_OF_OLDER_XLA = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
"""Fusions without MLIR: a small objective and its gradient compiled in 0.4 s instead of 1.7. Later XLA has no other way."""

_FLAGS = QUICK_ON_CPU | (_OF_OLDER_XLA if jaxlib.version.__version_info__ < (0, 11) else {})

QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in _FLAGS.items())

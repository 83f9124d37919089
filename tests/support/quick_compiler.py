"""XLA flags for programs of tests, which run a few times: they compile in a fifth of the time without optimisation."""

import jaxlib.version

from tunix_core.distributed.compilation import QUICK_ON_CPU

_OF_OLDER_XLA = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
"""Fusions without MLIR: a quarter of the time to compile a small objective and its gradient. Later XLA has no other way."""

_FLAGS = QUICK_ON_CPU | (_OF_OLDER_XLA if jaxlib.version.__version_info__ < (0, 11) else {})

QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in _FLAGS.items())

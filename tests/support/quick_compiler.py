"""XLA flags for programs of tests, which run a few times: they compile in a third of the time without optimisation."""

from tunix_core.distributed.compilation import QUICK_ON_CPU

QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK_ON_CPU.items())

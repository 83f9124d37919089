"""Memory of the log-probability part, value and gradient: fused over chunks of tokens against all logits at once.

Two measures that must agree: what XLA plans to allocate, and the peak resident memory of a process of
its own that runs it (`python -m tests.benchmarks.logprob_memory fused|full V D T`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.figures import Goal

VOCAB_SIZE = 131_072
MODEL_WIDTH = 128
GOAL_FRACTION = 1 / 8
VERSIONS = ("fused", "full")


def compiled(version: str, vocab_size: int, width: int, num_tokens: int) -> Any:
    """Executable of (head [D, V], hidden [1, T, D], targets [1, T]) -> loss and both gradients."""
    import jax
    import jax.numpy as jnp

    from tunix_core.config import ModelConfig
    from tunix_core.models.decoder import token_logprobs

    config = ModelConfig(vocab_size=vocab_size, model_width=width)

    def fused(head: jax.Array, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        return token_logprobs({"head": head}, config, hidden, targets, 1.0)[0].mean()

    def full(head: jax.Array, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        logprobs = jax.nn.log_softmax(hidden @ head)
        return jnp.take_along_axis(logprobs, targets[..., None], axis=-1).mean()

    function = {"fused": fused, "full": full}[version]
    return (
        jax.jit(jax.value_and_grad(function, argnums=(0, 1)))
        .lower(
            jax.ShapeDtypeStruct((width, vocab_size), jnp.float32),
            jax.ShapeDtypeStruct((1, num_tokens, width), jnp.float32),
            jax.ShapeDtypeStruct((1, num_tokens), jnp.int32),
        )
        .compile()
    )


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def run(version: str, vocab_size: int, width: int, num_tokens: int) -> dict[str, float]:
    """Planned bytes, peak resident bytes above those before the call, and seconds."""
    import jax
    import numpy as np

    executable = compiled(version, vocab_size, width, num_tokens)
    rng = np.random.default_rng(0)
    arguments = [
        jax.device_put(0.02 * rng.standard_normal((width, vocab_size), np.float32)),
        jax.device_put(rng.standard_normal((1, num_tokens, width), np.float32)),
        jax.device_put(rng.integers(0, vocab_size, (1, num_tokens), dtype=np.int32)),
    ]
    jax.block_until_ready(arguments)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew here, after compiling
    before = _resident_bytes("VmRSS")
    started = time.perf_counter()
    loss, _ = jax.block_until_ready(executable(*arguments))
    seconds = time.perf_counter() - started
    peak = _resident_bytes("VmHWM") - before
    planned = executable.memory_analysis().temp_size_in_bytes
    return {"planned_bytes": planned, "peak_bytes": peak, "seconds": seconds, "loss": float(loss)}


def measure(*, quick: bool) -> tuple[dict[str, Any], list[Goal]]:
    num_tokens = 2048 if quick else 4096
    figures: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "model_width": MODEL_WIDTH, "num_tokens": num_tokens}
    for version in VERSIONS:
        command = [sys.executable, "-m", "tests.benchmarks.logprob_memory", version]
        sizes = [str(size) for size in (VOCAB_SIZE, MODEL_WIDTH, num_tokens)]
        answer = subprocess.run([*command, *sizes], check=True, stdout=subprocess.PIPE, text=True)
        figures[version] = json.loads(answer.stdout)
    for name in ("planned_bytes", "peak_bytes", "seconds"):
        figures[f"{name}_ratio"] = figures["fused"][name] / figures["full"][name]
    difference = abs(figures["fused"]["loss"] / figures["full"]["loss"] - 1)
    goals = [
        Goal("log-probability memory as planned, fused / full", figures["planned_bytes_ratio"], GOAL_FRACTION, False),
        Goal("log-probability memory as resident, fused / full", figures["peak_bytes_ratio"], GOAL_FRACTION, False),
        Goal("log-probability loss, fused against full, relative difference", difference, 1e-5, False),
    ]
    return figures, goals


def report(figures: dict[str, Any]) -> None:
    print(
        f"\nLog probabilities, value and gradient: V {figures['vocab_size']}, D {figures['model_width']}, "
        f"{figures['num_tokens']} tokens"
    )
    print(f"{'':22}{'planned MiB':>12}{'peak MiB':>10}{'seconds':>10}")
    for version in VERSIONS:
        part = figures[version]
        print(
            f"{version:22}{part['planned_bytes'] / 2**20:>12.0f}{part['peak_bytes'] / 2**20:>10.0f}{part['seconds']:>10.2f}"
        )
    ratios = [f"1/{1 / figures[f'{name}_ratio']:.1f}" for name in ("planned_bytes", "peak_bytes", "seconds")]
    print(f"{'fused / full':22}{ratios[0]:>12}{ratios[1]:>10}{ratios[2]:>10}")


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], *(int(size) for size in sys.argv[2:5]))))

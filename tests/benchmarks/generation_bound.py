"""The least time that generation can take here: arithmetic at the matmul peak, reads at the memory's rate.

Per decode step the weights are read once, and each row's keys and values up to its position; a prompt is read in one
pass. FLOPs are 2mnk per product of a row. Both rates are measured in this run: large float32 products, and dot products
over as many bytes as a step reads, on all CPUs this process may use, so that weights that a cache holds count as
such. The bound is the larger of the two times; what an engine is above it, it spends on small matrices, on the draw,
on rows that nobody needs, on copies and between dispatches.

The part itself measures decode steps alone, all slots busy with requests of equal lengths.
"""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from tests.benchmarks.figures import Goal, Sample
from tests.benchmarks.generation_work import MODELS, Requests, make_requests, make_weights
from tests.benchmarks.peers.our_engine import actor_config, answer, make_engine
from tests.benchmarks.peers.requests import Request
from tests.benchmarks.utilisation import matmul_peak
from tunix_core.config import ModelConfig
from tunix_core.models.flops import layer_elements

FLOAT_BYTES = 4
BATCHES = (16, 32, 64)


class Needs(NamedTuple):
    flops: float
    bytes_read: float
    num_steps: float


def step_weights(model: ModelConfig) -> int:
    """Numbers that a decode step reads whatever its rows are: layers and head."""
    return model.num_layers * layer_elements(model) + model.model_width * model.vocab_size


def needs(model: ModelConfig, requests: Requests, batch: int) -> Needs:
    """Of all requests, with `batch` rows in every decode step."""
    prompts, num_new = requests.prompt_lengths.astype(float), requests.num_new.astype(float)
    weights = step_weights(model)
    # The prompt's pass draws the first token; token i of n comes after a row of prompt + i entries.
    decoded = num_new - 1
    entries = decoded * prompts + decoded * (decoded + 1) / 2
    pairs = entries + prompts * (prompts + 1) / 2
    heads, kv_heads = model.num_heads * model.head_width, model.num_kv_heads * model.head_width
    head = model.model_width * model.vocab_size
    products = weights * decoded + (weights - head) * prompts + head
    num_steps = decoded.sum() / batch
    return Needs(
        flops=float(2 * products.sum() + 4 * model.num_layers * heads * pairs.sum()),
        bytes_read=float(FLOAT_BYTES * (weights * num_steps + 2 * model.num_layers * kv_heads * entries.sum())),
        num_steps=float(num_steps),
    )


def read_rate(num_bytes: float, seconds: float = 0.5) -> float:
    """Bytes/s over a working set of so many bytes, the best of repetitions."""
    num_threads = len(os.sched_getaffinity(0))
    parts = [np.ones(max(1024, int(num_bytes / FLOAT_BYTES / num_threads)), np.float32) for _ in range(num_threads)]
    repeats = max(1, int(2e8 / num_bytes))

    def read(part: np.ndarray) -> None:
        for _ in range(repeats):
            np.max(part)  # vectorised, and no library's threads

    best, begun = float("inf"), time.perf_counter()
    with ThreadPoolExecutor(num_threads) as pool:
        while time.perf_counter() - begun < seconds or best == float("inf"):
            started = time.perf_counter()
            list(pool.map(read, parts))
            best = min(best, time.perf_counter() - started)
    return repeats * sum(part.nbytes for part in parts) / best


class Bound(NamedTuple):
    compute_seconds: float
    memory_seconds: float

    @property
    def seconds(self) -> float:
        return max(self)

    @property
    def kind(self) -> str:
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"


def bound_of(model: ModelConfig, requests: Requests, batch: int, peak: float) -> Bound:
    need = needs(model, requests, batch)
    return Bound(need.flops / peak, need.bytes_read / read_rate(need.bytes_read / need.num_steps))


def measure_steps(name: str, batch: int, num_rounds: int, peak: float) -> dict[str, Any]:
    """Seconds per decode step of `batch` rows."""
    model = MODELS[name]
    requests = make_requests("equal", batch, model.vocab_size)
    work = [Request(*pair) for pair in zip(requests.prompts(), requests.num_new.tolist(), strict=True)]
    # Every step has all rows and reads the whole context: one size of each.
    actor = actor_config(batch, requests.longest, int(requests.num_new.max()), num_sizes=1)
    engine = make_engine(model, actor, make_weights(model))
    asyncio.run(answer(engine, work, 0))
    seconds, num_steps = [], int(requests.num_new.max()) - 1
    for _ in range(num_rounds):
        before = engine.counters.decode_seconds, engine.counters.decode_rows
        asyncio.run(answer(engine, work, 0))
        steps = (engine.counters.decode_rows - before[1]) / batch
        seconds.append((engine.counters.decode_seconds - before[0]) / steps)
    # Reading the prompts is another dispatch.
    need = needs(model, requests, batch)
    prompts = needs(
        model, Requests(requests.prompt_lengths, requests.prompt_tokens, np.ones_like(requests.num_new)), batch
    )
    flops, num_bytes = (need.flops - prompts.flops) / num_steps, need.bytes_read / num_steps
    rate = read_rate(num_bytes)
    bound = Bound(flops / peak, num_bytes / rate)
    return {
        "model": name,
        "batch": batch,
        "flops": flops,
        "bytes_read": num_bytes,
        "read_bytes_per_second": rate,
        "seconds": Sample.of(seconds),
        "bound_seconds": bound.seconds,
        "bound_by": bound.kind,
        "of_bound": bound.seconds / Sample.of(seconds).median,
    }


def measure(*, quick: bool) -> tuple[dict[str, Any], list[Goal]]:
    """Without a goal: the figures tell where the next second is to be won."""
    peak = matmul_peak()
    cases = [("small", batch) for batch in BATCHES] if quick else [(name, b) for name in MODELS for b in BATCHES]
    steps = [measure_steps(*case, 2 if quick else 5, peak) for case in cases]
    return {"matmul_peak_flops_per_second": peak, "steps": steps}, []


def report(figures: dict[str, Any]) -> None:
    print(
        f"\nDecode steps against the bound; the matmul peak is {figures['matmul_peak_flops_per_second'] / 1e9:.0f} GFLOP/s"
    )
    print(f"{'':16}{'ms a step':>24}{'bound':>9}{'reached':>9}")
    for step in figures["steps"]:
        print(
            f"{step['model']:9}{step['batch']:>4}   {format(Sample(*(x * 1e3 for x in step['seconds'][:3]), 0), '.2f'):>24}"
            f"{step['bound_seconds'] * 1e3:>9.2f}{step['of_bound']:>9.1%}  by {step['bound_by']}: "
            f"{step['flops'] / 1e9:.2f} GFLOP, {step['bytes_read'] / 1e6:.1f} MB at "
            f"{step['read_bytes_per_second'] / 1e9:.0f} GB/s"
        )

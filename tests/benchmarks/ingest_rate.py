"""From bytes in the store to packed batches: polled, judged row by row, grouped, buffered, chosen, packed. On one core.

The learner's own rate, measured in the same run on the same trajectories' lengths, says how often over that is.
"""

from __future__ import annotations

import math
import tempfile
import time
from typing import Any

from tests.benchmarks import packing_gain
from tests.benchmarks.data_workload import GROUP_SIZE, VOCAB_SIZE, make_trajectories
from tests.benchmarks.figures import Goal, Sample
from tests.benchmarks.workload import MODELS, WINDOW_TOKENS, run_config
from tunix_core.data.buffer import ReplayBuffer
from tunix_core.data.ingestion import Ingestion
from tunix_core.data.packing import window_sizes
from tunix_core.learner.batches import assemble
from tunix_core.learner.credit import group_advantages
from tunix_core.storage.store import ObjectStore, open_store
from tunix_core.storage.trajectory_writer import TrajectoryWriter

ROWS_PER_SHARD = 64
TRAJECTORIES_PER_BATCH = 512
CLOCK = 1000
GOAL_RATIO = 20.0


def write(store: ObjectStore, num_trajectories: int) -> int:
    """Returns the number of tokens."""
    rows = make_trajectories(num_trajectories)
    writer = TrajectoryWriter(store, actor_id="actor_0_0", incarnation="inc0")
    for start in range(0, len(rows), ROWS_PER_SHARD):
        writer.write(rows[start : start + ROWS_PER_SHARD])
    writer.close()
    return sum(row.num_tokens for row in rows)


def ingest(store: ObjectStore, num_trajectories: int) -> dict[str, float]:
    """Everything once; wall and CPU seconds of the two halves."""
    config = run_config(MODELS["small"], TRAJECTORIES_PER_BATCH)
    buffer = ReplayBuffer(
        group_advantages=group_advantages(config.algorithm),
        window_tokens=WINDOW_TOKENS,
        max_staleness=2**30,
        buffer_bytes=2**32,
    )
    buffer.advance(CLOCK)
    ingestion = Ingestion(store, buffer, vocab_size=VOCAB_SIZE)
    started, cpu_started = time.perf_counter(), time.process_time()
    while ingestion.poll():
        pass
    polled = time.perf_counter()
    num_tokens, sizes, num_batches = 0, window_sizes(config), 0
    while True:
        taken = buffer.take(TRAJECTORIES_PER_BATCH // GROUP_SIZE, CLOCK, max_mean_staleness=math.inf)
        if not taken.groups:
            break
        batch = assemble(taken.groups, CLOCK, sizes, config)
        num_tokens += batch.num_tokens
        num_batches += 1
        buffer.consume(taken.groups, CLOCK)
    ended, cpu_ended = time.perf_counter(), time.process_time()
    assert buffer.ledger.trajectories()["consumed"] == num_trajectories, buffer.ledger.trajectories()
    return {
        "num_tokens": num_tokens,
        "num_batches": num_batches,
        "poll_seconds": polled - started,
        "batch_seconds": ended - polled,
        "cpu_seconds": cpu_ended - cpu_started,
    }


def measure(*, quick: bool = False) -> tuple[dict[str, Any], list[Goal]]:
    num = 2048 if quick else 8192
    with tempfile.TemporaryDirectory(prefix="data-plane-") as folder:
        store = open_store(folder)
        num_tokens = write(store, num)
        rounds = [ingest(store, num) for _ in range(4)][1:]
    assert all(each["num_tokens"] == num_tokens for each in rounds)
    # By CPU seconds: what a thread beside the learner costs it.
    rate = Sample.of(num_tokens / each["cpu_seconds"] for each in rounds)
    step = packing_gain.step_gain("small", TRAJECTORIES_PER_BATCH // 4, 2 if quick else 4)
    learner = step["seconds"]["packed"].inverse(step["num_tokens"])
    figures = {
        "num_tokens": num_tokens,
        "tokens_per_cpu_second": rate,
        "learner_tokens_per_second": learner,
        "poll_share": sum(each["poll_seconds"] for each in rounds)
        / sum(each["poll_seconds"] + each["batch_seconds"] for each in rounds),
    }
    return figures, [
        Goal("ingested over the learner's tokens/s", rate.median / learner.median, GOAL_RATIO, at_least=True)
    ]


def report(figures: dict[str, Any]) -> None:
    rate, learner = figures["tokens_per_cpu_second"], figures["learner_tokens_per_second"]
    print(f"\nIngestion: {figures['num_tokens']:,} tokens")
    print(
        f"  {rate:,.0f} tokens per CPU second, {figures['poll_share']:.0%} of the time reading and judging, the rest batches"
    )
    print(f"  the learner, small model: {learner:,.0f} tokens/s; ingestion over it: {rate.median / learner.median:.0f}")

"""How fast the learner is when data never is the limit: the baseline of a run's own token rate.

The same packing, transfer and compiled step, in the same order, over batches that the run really
consumed, from memory. What the run's rate lacks to this one it spent waiting or sharing its core.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from tunix_core.config import RunConfig
from tunix_core.data.packing import window_counts
from tunix_core.data.rows import RowFetcher
from tunix_core.errors import DataError
from tunix_core.learner.batches import assemble, batch_of_record
from tunix_core.learner.decoder_trainer import DecoderTrainer
from tunix_core.storage.step_records import read_steps
from tunix_core.storage.store import ObjectStore

MAX_BATCHES = 16
NUM_WARM_UP_STEPS = 2


class FullBufferRate(NamedTuple):
    """What was measured."""

    tokens_per_second: float
    """Real tokens of trajectories, padding excluded, over wall time."""
    num_steps: int
    seconds: float


def measure(
    store: ObjectStore,
    config: RunConfig,
    tensors: Mapping[str, np.ndarray],
    *,
    seconds: float,
    monotonic: Callable[[], float] = time.monotonic,
) -> FullBufferRate:
    """Train on the run's last batches over and over for `seconds`, the first two steps not counted.

    Args:
        tensors: any weights of the run; they are thrown away.

    Raises:
        DataError: the run has no steps.
    """
    records = read_steps(store, 0)[-MAX_BATCHES:]
    if not records:
        raise DataError("step records: found none, accepted at least one. Measure a run that has trained.")
    fetch = RowFetcher(store)
    batches = [batch_of_record(record, fetch, config.learner.window_tokens) for record in records]
    counts = window_counts(config)
    trainer = DecoderTrainer(config)
    trainer.compile(counts[-1])
    reference = trainer.reference(tensors)
    state = trainer.initial_state(tensors)
    num_tokens = num_steps = 0
    started = monotonic()
    for number, batch in enumerate(itertools.cycle(batches)):
        host = assemble(batch.groups, batch.clock, counts, config.learner.window_tokens)
        state, metrics = trainer.step(state, reference, trainer.put(host.arrays), host.denominator)
        float(metrics["loss"])  # blocks until the device is done
        if number < NUM_WARM_UP_STEPS:
            started = monotonic()
            continue
        num_tokens += host.num_tokens
        num_steps += 1
        if monotonic() - started >= seconds:
            break
    elapsed = monotonic() - started
    return FullBufferRate(num_tokens / elapsed, num_steps, elapsed)

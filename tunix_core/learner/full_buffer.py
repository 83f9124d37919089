"""How fast the learner is when data never is the limit: the baseline of a run's own token rate.

The same packing, transfer and compiled step, in the same order, over batches that the run really
consumed, from memory. What the run's rate lacks to this one it spent waiting or sharing its core.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tunix_core.config import RunConfig
from tunix_core.data.packing import window_sizes
from tunix_core.data.rows import RowFetcher
from tunix_core.errors import DataError
from tunix_core.learner.batches import assemble, batch_of_record
from tunix_core.learner.decoder_trainer import DecoderTrainer
from tunix_core.storage.parts import Tensors
from tunix_core.storage.step_records import read_steps
from tunix_core.storage.store import ObjectStore

MAX_BATCHES = 16
NUM_WARM_UP_STEPS = 2


class FullBufferRate(NamedTuple):
    """Real tokens of trajectories, padding excluded, over wall time; over several rounds."""

    tokens_per_second: float
    """The rounds' median."""
    lowest: float
    highest: float
    num_steps: int
    """Of all rounds, warm-up excluded."""
    seconds: float
    cpu_seconds: float
    """Of this process in that time. Well below `seconds`: others used the machine, and the rate is too low."""


def measure(
    store: ObjectStore,
    config: RunConfig,
    tensors: Tensors,
    reference_tensors: Tensors,
    *,
    seconds: float,
    num_rounds: int = 3,
    monotonic: Callable[[], float] = time.monotonic,
) -> FullBufferRate:
    """Train on the run's last batches over and over; the first two steps are not counted.

    Args:
        tensors: any weights of the run; they are thrown away.
        reference_tensors: those of its KL reference.
        seconds: of all rounds together; a round ends with the step that passes its share.
        num_rounds: so that a hiccup of the machine spoils one round, not the figure.

    Raises:
        DataError: the run has no steps.
    """
    records = read_steps(store, 0)[-MAX_BATCHES:]
    if not records:
        raise DataError("step records: found none, accepted at least one. Measure a run that has trained.")
    fetch = RowFetcher(store)
    batches = itertools.cycle([batch_of_record(record, fetch, config) for record in records])
    sizes = window_sizes(config)
    trainer = DecoderTrainer(config)
    for size in sizes:
        trainer.compile(size.counts[-1], size.tokens)
    reference = trainer.reference(reference_tensors)
    state = trainer.initial_state(tensors)

    def step() -> int:
        nonlocal state
        batch = next(batches)
        host = assemble(batch.groups, batch.clock, sizes, config)
        state, metrics = trainer.step(state, reference, trainer.put(host.arrays), host.denominator)
        float(metrics["loss"])  # blocks until the device is done
        return host.num_tokens

    for _ in range(NUM_WARM_UP_STEPS):
        step()
    rates, num_steps, begun, cpu_begun = [], 0, monotonic(), time.process_time()
    for _ in range(num_rounds):
        num_tokens, started = 0, monotonic()
        while num_tokens == 0 or monotonic() - started < seconds / num_rounds:
            num_tokens += step()
            num_steps += 1
        rates.append(num_tokens / (monotonic() - started))
    return FullBufferRate(
        tokens_per_second=float(np.median(rates)),
        lowest=min(rates),
        highest=max(rates),
        num_steps=num_steps,
        seconds=monotonic() - begun,
        cpu_seconds=time.process_time() - cpu_begun,
    )

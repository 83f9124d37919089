"""NaN from an empty mask (unsloth-zoo #1286, prime-rl #1961)."""

import io
import math

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.support import make_group
from tests.data.test_buffer import make_buffer
from tests.learner.step_cases import make_config, make_parameters, make_sequences
from tunix_core.config import OptimizerConfig
from tunix_core.data.ingestion import Ingestion
from tunix_core.distributed.mesh import make_mesh
from tunix_core.learner.train_step import make_train_step
from tunix_core.storage.quarantine import read_quarantine
from tunix_core.storage.shard_checks import with_digest
from tunix_core.storage.store import open_store
from tunix_core.storage.trajectory_writer import TrajectoryWriter


def test_all_masked_batch_is_harmless() -> None:
    """No policy token at all: zero gradient, the same parameters, counted as 0 tokens, nothing that is not finite.

    A shard with log probabilities that are NaN or null never gets here, see below.
    """
    config = make_config(optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.0))
    step = make_train_step(config, make_mesh(config.mesh))
    step.compile(8)
    batch = make_sequences().pack(num_windows=8)
    masked = batch._replace(loss_mask=np.zeros_like(batch.loss_mask))
    before = step.init_state(make_parameters(1))
    kept = jax.tree.map(np.array, before.params)
    after, metrics = step(before, step.put_reference(make_parameters(2)), step.put(masked), 0.0)
    figures = {name: float(value) for name, value in metrics.items()}
    assert all(np.isfinite(value) for value in figures.values()), figures
    assert (figures["policy_tokens"], figures["gradient_norm"], figures["loss"], figures["nonfinite"]) == (0, 0, 0, 0)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, after.params), kept)
    assert int(after.step) == 1


@pytest.mark.parametrize("value", [math.nan, None])
def test_a_shard_with_broken_logprobs_is_quarantined(value: float | None, tmp_path) -> None:
    """Two rows of a shard, by row and reason; the groups that they leave whole are trained on."""
    store, buffer = open_store(str(tmp_path)), make_buffer()
    writer = TrajectoryWriter(store, actor_id="actor", incarnation="a0")
    key = writer.write(make_group("g0") + make_group("g1") + make_group("g2"))
    table = pq.read_table(io.BytesIO(store.get(key)))
    logprobs = table.column("behavior_logprobs").to_pylist()
    for row in (2, 3):
        logprobs[row][-1] = value
    column = table.schema.get_field_index("behavior_logprobs")
    broken = table.set_column(column, "behavior_logprobs", pa.array(logprobs, pa.list_(pa.float32())))
    sink = io.BytesIO()
    pq.write_table(broken, sink)
    store.put(key, with_digest(sink.getvalue()))
    Ingestion(store, buffer, vocab_size=64).poll()
    (entry,) = read_quarantine(store)
    reason = "behavior_logprobs: null entry" if value is None else "behavior_logprobs: not finite"
    assert (entry.shard, entry.reason, entry.rows) == (key, None, {2: reason, 3: reason})
    assert buffer.ledger.trajectories()["quarantined"] == 2
    taken = buffer.take(2, 0, max_mean_staleness=math.inf).groups
    assert taken is not None
    assert [group.group_id for group in taken] == ["g0", "g2"]
    assert all(np.isfinite(group.rows.behavior_logprobs).all() for group in taken)

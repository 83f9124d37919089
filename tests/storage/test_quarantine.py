from __future__ import annotations

from tunix_core.storage.quarantine import quarantine_row, quarantine_rows, quarantine_shard, read_quarantine
from tunix_core.storage.store import ObjectStore
from tunix_core.types import RowRef

SHARD = "trajectories/date=2026-11-30/hour=04/a-inc0-00000003.parquet"
OTHER = "trajectories/date=2026-11-30/hour=05/a-inc0-00000003.parquet"


def test_reasons_are_kept_by_shard_and_row(store: ObjectStore) -> None:
    assert read_quarantine(store) == []
    quarantine_shard(store, SHARD, "truncated", num_bytes=10)
    quarantine_rows(store, OTHER, {3: "length", 1: "not finite"})
    quarantine_row(store, RowRef(shard=OTHER, row=2), "vocabulary")
    broken, rows = read_quarantine(store)
    assert (broken.shard, broken.reason, broken.num_bytes, broken.rows) == (SHARD, "truncated", 10, {})
    assert (rows.shard, rows.reason, rows.rows) == (OTHER, None, {1: "not finite", 2: "vocabulary", 3: "length"})


def test_a_repetition_changes_nothing(memory: ObjectStore) -> None:
    for reason in ("first", "second"):
        quarantine_shard(memory, SHARD, reason, num_bytes=10)
        quarantine_row(memory, RowRef(shard=SHARD, row=1), reason)
    (entry,) = read_quarantine(memory)
    assert (entry.reason, entry.rows) == ("first", {1: "first"})

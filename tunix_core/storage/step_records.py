"""The redo log, `steps/<clock>.json`: what a step consumes, committed before the step is dispatched.

Creating a record is the learner's fence: of two learners at the same clock one wins, and the other is
a zombie and must exit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunix_core import paths
from tunix_core.errors import CorruptObject, Fenced, ObjectExists
from tunix_core.storage.store import ObjectStore, from_json, map_requests, read_json, to_json


def write_step(store: ObjectStore, clock: int, record: Mapping[str, Any]) -> None:
    """Commit the record of the step that ends at `clock`.

    Raises:
        Fenced: another learner has written this step. The same record again is fine: a repetition
            after a lost answer. (Records name their learner's incarnation, so equal means own.)
    """
    data = to_json({**record, "clock": clock})
    try:
        store.put_if_absent(paths.step(clock), data)
    except ObjectExists:
        found = store.get(paths.step(clock))
        if found != data:
            owner = from_json(paths.step(clock), found).get("incarnation", "another learner")
            raise Fenced(f"{paths.step(clock)}: already written by {owner}; this learner must exit") from None


def read_steps(store: ObjectStore, after_clock: int) -> list[dict[str, Any]]:
    """Records of clocks `after_clock + 1, after_clock + 2, …` in order; each has its `clock`.

    Raises:
        CorruptObject: a clock is missing in between, or a record is of another clock than its key.
    """
    keys = store.list_after(paths.STEPS, paths.step(after_clock))
    records = map_requests(store, lambda key: read_json(store, key), keys)
    for expected, (key, record) in enumerate(zip(keys, records, strict=True), start=after_clock + 1):
        if key != paths.step(expected) or record.get("clock") != expected:
            raise CorruptObject(
                f"{key}: received clock {record.get('clock')!r}, accepted {expected}: a record is missing"
            )
    return records

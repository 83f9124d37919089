"""What a poll of the learner's reader costs, in requests and in keys listed, with more and more old shards behind it."""

from __future__ import annotations

import collections
from typing import Any

from tests.benchmarks.data_workload import make_trajectories
from tests.benchmarks.figures import Goal
from tunix_core import paths
from tunix_core.storage.memory_store import MemoryStore
from tunix_core.storage.shards import encode
from tunix_core.storage.store import write_json
from tunix_core.storage.trajectory_reader import TrajectoryReader
from tunix_core.storage.writers import WriterRecord

NUM_WRITERS = 64
NUM_HOURS = 48
NUM_NEW = 8
START = 1_800_000_000.0
MAX_GROWTH = 1.0
"""Of the cost with the most old shards over that with the fewest."""


class CountingStore(MemoryStore):
    """Counts what is asked of it, and the keys that listings return."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.requests: collections.Counter[str] = collections.Counter()
        self.num_listed = 0

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        return super().get(key)

    def list_after(self, prefix: str, after: str = "") -> list[str]:
        found = super().list_after(prefix, after)
        self.requests["list"] += 1
        self.num_listed += len(found)
        return found


def poll_cost(num_old: int) -> dict[str, int]:
    """Of one poll that finds `NUM_NEW` new shards; every writer has written into every hour."""
    store = CountingStore(f"poll-{num_old}")
    hours = [paths.hour_partition(START + 3600 * number) for number in range(NUM_HOURS)]
    per_hour = max(1, num_old // (NUM_WRITERS * NUM_HOURS))
    data = encode(make_trajectories(8))
    cursors: dict[str, Any] = {}
    for writer in range(NUM_WRITERS):
        incarnation = f"inc{writer:04d}"
        record = WriterRecord(
            incarnation=incarnation,
            actor_id="actor",
            created_at=START,
            hours=tuple((hour, place * per_hour) for place, hour in enumerate(hours)),
        )
        write_json(store, paths.writer(incarnation), record.to_dict())
        for place, hour in enumerate(hours):
            for sequence in range(place * per_hour, (place + 1) * per_hour):
                store.put(paths.ShardName(hour, "actor", incarnation, sequence).key, b"")
        position = NUM_HOURS * per_hour
        cursors[incarnation] = {
            "actor_id": "actor", "created_at": START, "next_sequence": position, "hour": hours[-1], "closed": False,
        }  # fmt: skip
        if writer < NUM_NEW:
            store.put(paths.ShardName(hours[-1], "actor", incarnation, position).key, data)
    now = START + 3600 * (NUM_HOURS - 1) + 600  # no hour begins or ends near
    reader = TrajectoryReader(store, {"format": 1, "cursors": cursors}, clock=lambda: now)
    reader.poll(0)  # the first one looks at announcements once more
    before, listed = store.requests.copy(), store.num_listed
    assert len(reader.poll()) == NUM_NEW
    spent = store.requests - before
    return {
        "num_old": NUM_WRITERS * NUM_HOURS * per_hour,
        "requests": sum(spent.values()),
        "keys_listed": store.num_listed - listed,
    }


def measure(*, quick: bool = False) -> tuple[dict[str, Any], list[Goal]]:
    sizes = [3_000, 30_000, 100_000] if quick else [3_000, 30_000, 300_000, 1_000_000]
    rows = [poll_cost(size) for size in sizes]
    goals = [
        Goal(f"{what} of a poll, growth from {rows[0]['num_old']:,} to {rows[-1]['num_old']:,} old shards",
             rows[-1][key] / rows[0][key], MAX_GROWTH, at_least=False)
        for key, what in (("requests", "requests"), ("keys_listed", "keys listed"))
    ]  # fmt: skip
    return {"polls": rows}, goals


def report(figures: dict[str, Any]) -> None:
    print(f"\nOne poll, {NUM_WRITERS} live writers, {NUM_NEW} new shards")
    for row in figures["polls"]:
        print(f"  {row['num_old']:10,} old shards: {row['requests']} requests, {row['keys_listed']} keys listed")

"""Trajectories worth imitating, from shards: what a run is distilled from. Ids are taken as they are."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tunix_core.errors import ConfigError, CorruptObject
from tunix_core.storage.shard_archive import ArchivedShard, ShardArchive, as_read
from tunix_core.storage.store import ObjectStore


@dataclasses.dataclass(frozen=True, kw_only=True)
class Successes:
    """Of some shards."""

    rows: list[tuple[np.ndarray, np.ndarray]]
    """`tokens` int32 [T] and `loss_mask` bool [T] of each."""
    left_out: dict[str, int]
    """Rows by why they are not there: `faulty`, `held_out` (tasks that evaluations use), `low_reward`."""
    sha256: str
    """Of the shards, in order."""


def read_successes(shards: Iterable[ArchivedShard], *, min_reward: float) -> Successes:
    """Training trajectories with a reward of at least `min_reward`.

    Raises:
        CorruptObject: one is no shard.
    """
    rows = []
    left_out: collections.Counter[str] = collections.Counter(faulty=0, held_out=0, low_reward=0)
    digest = hashlib.sha256()
    for key, sha256, _, shard, fault in shards:
        digest.update(bytes.fromhex(sha256))
        if shard is None:
            raise CorruptObject(f"{key}: {fault}")
        rewards, splits = shard.column("reward"), shard.column("split")
        for row in range(shard.num_rows):
            if row in shard.faults:
                left_out["faulty"] += 1
            elif splits[row] != "train":
                left_out["held_out"] += 1
            elif not rewards[row] >= min_reward:
                left_out["low_reward"] += 1
            else:
                # Copies: a view would keep its whole shard in memory.
                rows.append((shard.list_value("tokens", row).copy(), shard.list_value("loss_mask", row).copy()))
    return Successes(rows=rows, left_out=dict(left_out), sha256=digest.hexdigest())


def shards_of_file(path: Path, *, vocab_size: int) -> Iterable[ArchivedShard]:
    """A shard on its own; raises ConfigError where there is none."""
    if not path.is_file():
        raise ConfigError("--data", str(path), "an existing file", "Check the path.")
    return [as_read(str(path), path.read_bytes(), vocab_size=vocab_size)]


def shards_of_run(store: ObjectStore, *, vocab_size: int) -> Iterable[ArchivedShard]:
    """Those of a run, in order."""
    archive = ShardArchive(store)
    return archive.read(archive.keys(), vocab_size=vocab_size)

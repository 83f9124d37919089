"""Trajectories worth imitating, from shards: what a run is distilled from. Ids are taken as they are."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tunix_core import paths
from tunix_core.errors import ConfigError, CorruptObject
from tunix_core.storage.shards import decode
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


def read_successes(shards: Iterable[tuple[str, bytes]], *, min_reward: float, vocab_size: int) -> Successes:
    """Training trajectories with a reward of at least `min_reward`.

    Args:
        shards: name and bytes of each.

    Raises:
        CorruptObject: one is no shard.
    """
    rows = []
    left_out: collections.Counter[str] = collections.Counter(faulty=0, held_out=0, low_reward=0)
    digest = hashlib.sha256()
    for name, data in shards:
        digest.update(hashlib.sha256(data).digest())
        try:
            shard = decode(data, vocab_size=vocab_size)
        except CorruptObject as error:
            raise CorruptObject(f"{name}: {error}") from error
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


def shards_of_file(path: Path) -> Iterable[tuple[str, bytes]]:
    """A shard on its own; raises ConfigError where there is none."""
    if not path.is_file():
        raise ConfigError("--data", str(path), "an existing file", "Check the path.")
    return [(str(path), path.read_bytes())]


def shards_of_run(store: ObjectStore) -> Iterable[tuple[str, bytes]]:
    """Those of a run, in order."""
    return ((key, store.get(key)) for key in store.list_after(paths.TRAJECTORIES))

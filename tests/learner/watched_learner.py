"""`tasks.run_learner`, which tells at its end what it read and what it put on its devices."""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from tasks import run_learner
from tunix_core.learner.train_step import TrainStep
from tunix_core.storage.local_store import LocalStore


def watch() -> None:
    """Lines `read <shard>` and `put <row of tokens>` for each shard read and each window on a device of this process.

    And `weights <bytes>`, of the policies read up to then.
    """
    get, get_range, put = LocalStore.get, LocalStore.get_range, TrainStep.put
    seen: set[str] = set()
    num_bytes = 0

    def counted(key: str, data: bytes) -> bytes:
        nonlocal num_bytes
        if key.startswith("policies/") and key.endswith(".safetensors"):
            num_bytes += len(data)
            print(f"weights {num_bytes}", flush=True)
        return data

    def watched_get(self: LocalStore, key: str) -> bytes:
        if key.startswith("trajectories/") and key not in seen:
            seen.add(key)
            print(f"read {key}", flush=True)
        return counted(key, get(self, key))

    def watched_get_range(self: LocalStore, key: str, start: int, stop: int) -> bytes:
        return counted(key, get_range(self, key, start, stop))

    def watched_put(self: TrainStep, batch: object) -> object:
        placed = put(self, batch)
        time.sleep(float(os.environ["WATCHED_STEP_SECONDS"]))  # so that there is something to kill
        for shard in placed.windows.tokens.addressable_shards:
            for window in np.asarray(shard.data):
                if window.any():
                    print("put " + ",".join(map(str, window.tolist())), flush=True)
        return placed

    LocalStore.get, LocalStore.get_range = watched_get, watched_get_range  # type: ignore[method-assign]
    TrainStep.put = watched_put  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    watch()
    sys.exit(run_learner.main())

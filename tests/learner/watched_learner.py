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
    """Lines `read <shard>` and `put <row of tokens>` for each shard read and each window on a device of this process."""
    get, put = LocalStore.get, TrainStep.put
    seen: set[str] = set()

    def watched_get(self: LocalStore, key: str) -> bytes:
        if key.startswith("trajectories/") and key not in seen:
            seen.add(key)
            print(f"read {key}", flush=True)
        return get(self, key)

    def watched_put(self: TrainStep, batch: object) -> object:
        placed = put(self, batch)
        time.sleep(float(os.environ["WATCHED_STEP_SECONDS"]))  # so that there is something to kill
        for shard in placed.windows.tokens.addressable_shards:
            for window in np.asarray(shard.data):
                if window.any():
                    print("put " + ",".join(map(str, window.tolist())), flush=True)
        return placed

    LocalStore.get, TrainStep.put = watched_get, watched_put  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    watch()
    sys.exit(run_learner.main())

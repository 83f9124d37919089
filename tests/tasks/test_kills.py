"""kill -9 at random moments, over a network that drops, repeats and reorders: the ledger stays exact to the token."""

from __future__ import annotations

import collections
import os
import random
import time
from pathlib import Path

import pytest

from tests.support.fault_proxy import FaultProxy, FaultRates, SeededFaults
from tests.support.gcs import emulated_gcs, emulator_environment
from tests.support.whole_run import MODULES, configuration, whole_run

NUM_KILLS = int(os.environ.get("TUNIX_KILLS", "50"))
SEED = int(os.environ.get("TUNIX_KILLS_SEED", "0"))
FAULT_RATE = 0.003
"""Of each of seven kinds."""
VICTIMS = (*MODULES, "learner", "sync_weights")
"""Actors are two already."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_ledger_is_exact_after_random_kills_under_a_faulty_store(tmp_path: Path, cache: Path) -> None:
    rng = random.Random(SEED)
    killed: collections.Counter[str] = collections.Counter()
    with emulated_gcs() as emulator:
        proxy = FaultProxy(emulator.url, SeededFaults(FaultRates.each(FAULT_RATE), seed=SEED))
        try:
            config = configuration(10**6)
            environment = emulator_environment(proxy.url)
            with whole_run(f"{emulator.uri}/run", config, tmp_path, cache, environment) as run:
                run.revives = True
                run.start()
                run.wait_for(lambda: run.revive() or run.clock() >= 2, "the first steps")
                for number in range(NUM_KILLS):
                    time.sleep(rng.uniform(0.1, 6.0))
                    run.revive()
                    victim = rng.choice(VICTIMS)
                    run.kill(victim)
                    killed[victim] += 1
                    run.start(victim)
                    if number % 10 == 9:  # a learner that never gets to its end of recovery would prove nothing
                        clock = run.clock()
                        run.wait_for(lambda c=clock: run.revive() or run.clock() > c + 1, f"kill {number + 1}")  # type: ignore[misc]
                run.stop_reviving()
                audit = run.audit()
                ledger = run.progress()["ledger"]
        finally:
            proxy.stop()
    print(f"seed {SEED}: killed {dict(killed)}, {len(audit.steps)} steps, {len(audit.policy_versions)} versions, "
          f"{audit.written_trajectories} trajectories, requests {len(proxy.requests)}, faults {dict(proxy.counts)}, "
          f"ledger {ledger}")  # fmt: skip
    assert sum(killed.values()) == NUM_KILLS
    assert audit.steps
    assert proxy.num_faults > NUM_KILLS

"""A run of real processes, and its simulation from the times that it measured of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.whole_run import configuration, whole_run
from tunix_core.config_loading import build
from tunix_core.console.calibration import measure
from tunix_core.console.simulation import distance, setting_of
from tunix_core.simulation.setting import Setting
from tunix_core.simulation.simulate import simulate

NUM_STEPS = 80
MAX_DISTANCE = 0.25
"""Share of trajectories that may differ in staleness: a machine that does other things as well shifts them by a step."""
MAX_DISCARDS_APART = 0.05


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_staleness_and_discards_of_a_run_are_those_of_its_simulation(tmp_path: Path, cache: Path) -> None:
    config = configuration(NUM_STEPS)
    with whole_run(str(tmp_path / "run"), config, tmp_path, cache) as run:
        run.start()
        run.wait_for_steps(NUM_STEPS, "the whole run")
        run.wait_for_end()
        audit = run.audit()
        measured = measure(run.store, config)
    outcome = simulate(build(Setting, {**setting_of(config), **measured.fields()}), measured.draw)
    apart = distance(outcome.staleness, measured.staleness)
    print(f"real {measured.staleness}, simulated {outcome.staleness}: {apart:.1%} differ; "
          f"discarded {measured.discarded_token_fraction:.1%} and {outcome.discarded_token_fraction:.1%}")  # fmt: skip
    assert audit.staleness == measured.staleness, "two counts of the same steps"
    assert apart <= MAX_DISTANCE
    assert abs(outcome.discarded_token_fraction - measured.discarded_token_fraction) <= MAX_DISCARDS_APART

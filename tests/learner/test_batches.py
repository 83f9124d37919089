"""What a batch says of its tokens beyond what packing does."""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.data.support import make_rows, make_trajectory
from tests.learner.support import make_config
from tunix_core.data.groups import Group
from tunix_core.data.packing import WindowSize, sampler_number
from tunix_core.learner.batches import assemble


def test_only_trajectories_wholly_of_the_clocks_version_are_at_equal_version() -> None:
    """At clock 3: one of version 3, one that was swapped from 2 to 3 on its way, one of version 2."""
    lengths = (9, 10, 11)
    own, swapped, old = (
        make_trajectory(f"g/{i}", version=version, length=length)
        for i, (version, length) in enumerate(zip((3, 3, 2), lengths, strict=True))
    )
    versions = swapped.token_policy_version.copy()
    versions[:6] = np.where(swapped.loss_mask[:6], 2, -1)
    swapped = dataclasses.replace(swapped, token_policy_version=versions)
    rows = make_rows("trajectories/date=2026-11-30/hour=00/actor-a0-00000000.parquet", [own, swapped, old])
    group = Group(group_id="g", rows=rows, advantages=np.ones(3, np.float32), arrival=0, num_bytes=rows.num_bytes)
    batch = assemble([group], 3, [WindowSize(make_config().learner.window_tokens, (1, 2, 3))], make_config())
    marked = [
        (batch.arrays.equal_version[window, start : start + length] > 0).sum()
        for window, start, length in zip(batch.layout.window, batch.layout.start, lengths, strict=True)
    ]
    assert marked == [own.num_policy_tokens, 0, 0]
    assert (batch.arrays.equal_version > 0).sum() == own.num_policy_tokens > 0
    assert batch.arrays.equal_version.max() == sampler_number("actor")

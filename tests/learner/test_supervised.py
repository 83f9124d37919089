"""The warm start where there is none."""

from __future__ import annotations

import jax
import numpy as np

from tests.support.run_factory import tiny_config
from tunix_core.learner.supervised import start_parameters, warm_start
from tunix_core.tokenizer import ByteTokenizer


def test_without_steps_the_start_is_taken_as_it_is() -> None:
    config = tiny_config(**{"warm_start.num_steps": 0})
    reports: list[dict] = []
    result = warm_start(config, lambda _: 0.05, reports.append, tokenizer=ByteTokenizer())
    assert (result.num_steps, result.success) == (0, 0.05)
    fresh, base = start_parameters(config, None)
    assert base is None
    jax.tree.map(np.testing.assert_array_equal, result.params, fresh)
    assert [report["success"] for report in reports] == [0.05]

"""Every policy loss, correction, leash and aggregation on packed windows, against trajectories one by one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.learner import step_cases
from tests.learner.objective_oracle import (
    CASES,
    SEQUENCES,
    algorithm_of,
    along,
    compiled,
    denominator_of,
    derivative,
    make_batch,
    oracle,
    slopes,
)
from tests.learner.step_cases import make_parameters
from tunix_core.config import AlgorithmConfig
from tunix_core.errors import ConfigError


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())) or "default")
def test_value_and_gradient_against_the_loop(case: dict[str, Any]) -> None:
    """The gradient along a direction: the oracle's by central differences in each log probability."""
    a = algorithm_of(case)
    params, reference = make_parameters(1), make_parameters(2)
    batch = make_batch()
    loss, gradient = compiled(a)(params, reference, batch, denominator_of(a))

    current, anchor = step_cases.logprobs(params, SEQUENCES), step_cases.logprobs(reference, SEQUENCES)
    assert float(loss) == pytest.approx(oracle(a, current, current, anchor), rel=2e-5, abs=1e-6)

    slope = slopes(a, current, anchor)
    for seed in (3, 4):
        direction = make_parameters(seed)
        expected = derivative(slope, params, direction)
        assert along(gradient, direction) == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())) or "default")
def test_masked_values_and_empty_windows_are_harmless(case: dict[str, Any]) -> None:
    a = algorithm_of(case)
    params, reference = make_parameters(1), make_parameters(2)
    clean = make_batch()
    mask = clean.loss_mask
    dirty = clean._replace(
        behavior_logprobs=jnp.where(mask, clean.behavior_logprobs, jnp.nan),
        advantages=jnp.where(mask, clean.advantages, jnp.inf),
    )
    found, wanted = (compiled(a)(params, reference, batch, 7.0) for batch in (dirty, clean))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    nothing = clean._replace(loss_mask=jnp.zeros_like(mask))
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(compiled(a)(params, reference, nothing, 7.0)))


@pytest.mark.parametrize(
    ("case", "field"),
    [
        ({"loss": "ppo"}, "algorithm.correction"),
        ({"loss": "gspo", "correction": "truncate"}, "algorithm.correction"),
        ({"correction": "none"}, "algorithm.correction"),
        ({"dual_clip": 0.5}, "algorithm.dual_clip"),
        ({"dual_clip": 3.0, "loss": "cispo", "correction": "none"}, "algorithm.dual_clip"),
        ({"kl_estimator": "k1"}, "algorithm.kl_estimator"),
        ({"kl_in": "reward"}, "algorithm.kl_estimator"),
        ({"kl_in": "reward", "kl_estimator": "k3", "loss": "gspo", "correction": "none"}, "algorithm.kl_in"),
        ({"loss": "dpo"}, "algorithm.loss"),
        ({"aggregation": "mean"}, "algorithm.aggregation"),
        ({"advantage": "sarsa"}, "algorithm.advantage"),
        ({"discount": 0.9}, "algorithm.discount"),
        ({"advantage": "turn_level", "discount": 1.1}, "algorithm.discount"),
        ({"loss": "vtrace", "correction": "none"}, "algorithm.advantage"),
        ({"advantage": "gae", "loss": "vtrace"}, "algorithm.correction"),
        ({"advantage": "gae", "loss": "gspo", "correction": "none"}, "algorithm.loss"),
        ({"advantage": "gae", "filter_zero_signal_groups": True}, "algorithm.filter_zero_signal_groups"),
        ({"advantage": "gae", "trace_decay": 1.5}, "algorithm.trace_decay"),
        ({"advantage": "gae", "value_coefficient": 0.0}, "algorithm.value_coefficient"),
        ({"advantage": "gae", "value_clip": -1.0}, "algorithm.value_clip"),
        ({"advantage": "turn_level", "filter_zero_signal_groups": True}, "algorithm.filter_zero_signal_groups"),
        ({"advantage": "turn_level", "loss": "gspo", "correction": "none"}, "algorithm.loss"),
    ],
)
def test_what_does_not_belong_together_is_refused(case: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: received"):
        AlgorithmConfig(**case)

"""Segments attended to each other without one kernel (google-tunix, measured; maxtext #5100)."""

from __future__ import annotations

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_core.config import ModelConfig
from tunix_core.distributed.compilation import QUICK_ON_CPU
from tunix_core.models import decoder
from tunix_core.models.attention import Backend

MODEL = ModelConfig(
    vocab_size=31, model_width=16, num_layers=2, num_heads=4, num_kv_heads=2, head_width=8, mlp_width=24
)
LENGTHS = [70, 7, 90]


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("backend", [name for name in typing.get_args(Backend) if name != "auto"])
def test_packing_isolates_on_every_backend(backend: Backend, sliding: bool) -> None:
    """Packed = unpacked: log probabilities and the gradient of every parameter."""
    local = {"sliding_window": 20, "sliding_period": 2} if sliding else {}
    config = dataclasses.replace(MODEL, attention=backend, **local)
    params = decoder.init_parameters(config, 0)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 31, length).astype(np.int32) for length in LENGTHS]
    weights = [rng.normal(size=length).astype(np.float32) for length in LENGTHS]

    def run(tokens, positions, segment_ids, weights):  # type: ignore[no-untyped-def]
        def loss(params: decoder.Params) -> tuple[jax.Array, jax.Array]:
            hidden = decoder.hidden_states(params, config, tokens, positions, segment_ids)
            logprobs, _ = decoder.token_logprobs(params, config, hidden, jnp.roll(tokens, -1, axis=1), 1.0)
            return (logprobs * weights).sum(), logprobs

        return jax.grad(loss, has_aux=True)(params)

    compiled = jax.jit(run, compiler_options=QUICK_ON_CPU)
    width = 192  # 25 tokens of padding

    def packed(parts: list[np.ndarray]) -> np.ndarray:
        joined = np.concatenate(parts)
        return np.pad(joined, (0, width - len(joined)))[None]

    # The target of a segment's last token is its neighbour's first: it has no weight.
    for row in weights:
        row[-1] = 0
    gradient, logprobs = compiled(
        packed(rows),
        packed([np.arange(length, dtype=np.int32) for length in LENGTHS]),
        packed([np.full(length, i + 1, np.int32) for i, length in enumerate(LENGTHS)]),
        packed(weights),
    )
    total = jax.tree.map(np.zeros_like, jax.device_get(gradient))
    start = 0
    for row, weight in zip(rows, weights, strict=True):
        alone, expected = compiled(
            packed([row]),
            packed([np.arange(len(row), dtype=np.int32)]),
            packed([np.ones(len(row), np.int32)]),
            packed([weight]),
        )
        stop = start + len(row) - 1
        np.testing.assert_allclose(logprobs[0, start:stop], expected[0, : len(row) - 1], atol=1e-5)
        total = jax.tree.map(lambda sum_, part: sum_ + np.asarray(part), total, alone)
        start += len(row)
    for name, leaf in decoder.flatten_parameters(gradient).items():
        other = decoder.flatten_parameters(total)[name]
        np.testing.assert_allclose(leaf, other, atol=2e-5 + 1e-4 * np.abs(other).max(), err_msg=name)

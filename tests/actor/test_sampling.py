import jax
import numpy as np
import pytest

from tests.actor.support import engine, weights
from tunix_core.actor import sampling
from tunix_core.actor.policy_engine import Request
from tunix_core.errors import ConfigError


def rows(seed: int, num_rows: int, vocabulary: int, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, (num_rows, vocabulary)).astype(np.float32)


def keys(num_rows: int) -> np.ndarray:
    return np.stack([sampling.request_key("test", i) for i in range(num_rows)])


@pytest.mark.parametrize("vocabulary", [2, 127, 128, 272, 1000])
def test_inverse_cdf_equals_a_float64_search(vocabulary: int) -> None:
    weights = np.exp(rows(0, 200, vocabulary))
    uniform = np.random.default_rng(1).random(200).astype(np.float32)
    found = np.asarray(jax.jit(sampling.inverse_cdf)(weights, uniform))
    running = np.cumsum(weights.astype(np.float64), -1)
    expected = np.array([np.searchsorted(r, u * r[-1], "right") for r, u in zip(running, uniform, strict=True)])
    # A uniform within rounding of a boundary may fall on either side of it.
    below = np.where(expected > 0, np.take_along_axis(running, np.maximum(expected - 1, 0)[:, None], 1)[:, 0], 0)
    near = np.minimum(
        np.abs(uniform * running[:, -1] - below),
        np.abs(uniform * running[:, -1] - np.take_along_axis(running, expected[:, None], 1)[:, 0]),
    )
    clear = near > 1e-5 * running[:, -1]
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(found[clear], expected[clear])


def test_an_entry_of_weight_zero_is_never_drawn() -> None:
    weights = np.zeros((4, 300), np.float32)
    weights[:, [5, 130, 131]] = 1e-3, 1.0, 1e-7
    uniform = np.array([0.0, 0.5, np.nextafter(np.float32(1), np.float32(0)), 0.9999], np.float32)
    found = np.asarray(jax.jit(sampling.inverse_cdf)(weights, uniform))
    assert set(found.tolist()) <= {5, 130, 131}
    assert found[0] == 5


def test_frequencies_follow_the_distribution_at_the_temperature() -> None:
    logits = np.array([2.0, 0.0, -1.0, 1.0], np.float32)
    num, temperature = 20_000, 0.7
    tokens, logprobs = jax.jit(sampling.sample)(
        np.tile(logits, (num, 1)), keys(num), np.zeros(num, np.int32), np.full(num, temperature, np.float32)
    )
    expected = np.exp(logits.astype(np.float64) / temperature)
    expected /= expected.sum()
    observed = np.bincount(np.asarray(tokens), minlength=4) / num
    np.testing.assert_allclose(observed, expected, atol=4 * np.sqrt(0.25 / num))
    np.testing.assert_allclose(np.asarray(logprobs), np.log(expected)[np.asarray(tokens)], rtol=1e-5, atol=1e-6)


def test_a_sample_does_not_depend_on_its_batch() -> None:
    logits, all_keys, positions = rows(2, 32, 272), keys(32), np.arange(32, dtype=np.int32)
    temperatures = np.ones(32, np.float32)
    draw = jax.jit(sampling.sample)
    whole, _ = draw(logits, all_keys, positions, temperatures)
    order = np.random.default_rng(0).permutation(32)[:7]
    part, _ = draw(logits[order], all_keys[order], positions[order], temperatures[order])
    np.testing.assert_array_equal(np.asarray(whole)[order], np.asarray(part))


def test_other_keys_and_other_positions_give_other_uniforms() -> None:
    drawn = np.asarray(
        jax.jit(sampling.uniforms)(np.repeat(keys(50), 20, 0), np.tile(np.arange(20, dtype=np.int32), 50))
    )
    assert len(np.unique(drawn)) > 990
    assert (drawn >= 0).all()
    assert (drawn < 1).all()


def test_greedy_takes_the_likeliest_at_temperature_one() -> None:
    logits = rows(3, 10, 272)
    tokens, logprobs = jax.jit(sampling.greedy)(logits)
    np.testing.assert_array_equal(np.asarray(tokens), logits.argmax(-1))
    wide = logits.astype(np.float64)
    np.testing.assert_allclose(np.asarray(logprobs), wide.max(-1) - np.log(np.exp(wide).sum(-1)), rtol=1e-5, atol=1e-5)


def test_request_keys_differ_by_every_part() -> None:
    found = {sampling.request_key(*parts).tobytes() for parts in [(0, "a", 0), (0, "a", 1), (0, "b", 0), (1, "a", 0)]}
    assert len(found) == 4


def limits(num_rows: int, **given: float | bool) -> sampling.Draws:
    values = {"greedy": False, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **given}
    kinds = {"greedy": bool, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
    rows = sampling.Limits(**{name: np.full(num_rows, value, kinds[name]) for name, value in values.items()})
    return sampling.Draws(keys(num_rows), np.ones(num_rows, np.float32), rows)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [0.4, 0.2, 0.2, 0.1, 0.1]),
        ({"top_k": 1}, [1, 0, 0, 0, 0]),
        ({"top_k": 2}, [0.5, 0.25, 0.25, 0, 0]),  # as likely as the second: it stays
        ({"top_k": 9}, [0.4, 0.2, 0.2, 0.1, 0.1]),
        ({"top_p": 0.35}, [1, 0, 0, 0, 0]),
        ({"top_p": 0.5}, [0.5, 0.25, 0.25, 0, 0]),
        ({"top_k": 3, "top_p": 0.49}, [1, 0, 0, 0, 0]),  # 0.5 of what top-k left
        ({"min_p": 0.4}, [0.5, 0.25, 0.25, 0, 0]),
        ({"greedy": True}, [1, 0, 0, 0, 0]),
    ],
)
def test_truncation_keeps_what_it_says_and_renormalises(given: dict[str, float], expected: list[float]) -> None:
    num = 400
    logits = np.tile(np.log(np.array([0.1, 0.4, 0.2, 0.1, 0.2], np.float32)), (num, 1))
    tokens, logprobs = map(
        np.asarray, jax.jit(sampling.truncated)(logits, np.arange(num, dtype=np.int32), limits(num, **given))
    )
    probabilities = np.array(expected)[[3, 0, 1, 4, 2]]
    assert set(tokens.tolist()) == set(np.flatnonzero(probabilities).tolist())
    recorded = np.full(num, np.log(0.4)) if "greedy" in given else np.log(probabilities[tokens])
    np.testing.assert_allclose(logprobs, recorded, atol=1e-5)


def test_rows_of_different_settings_do_not_meet() -> None:
    """Each row of a mixed batch is what it is alone, bit for bit."""
    logits, positions = rows(4, 12, 272), np.arange(12, dtype=np.int32)
    settings = [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"greedy": True}]
    draw = jax.jit(sampling.truncated)
    alone = [draw(logits, positions, limits(12, **settings[row % 4])) for row in range(4)]
    parts = [limits(12, **settings[row % 4]).limits for row in range(12)]
    mixed = sampling.Limits(*(np.array([getattr(p, name)[0] for p in parts]) for name in sampling.Limits._fields))
    tokens, logprobs = draw(logits, positions, limits(12)._replace(limits=mixed))
    for row in range(12):
        assert tokens[row] == alone[row % 4][0][row]
        assert logprobs[row] == alone[row % 4][1][row]


def test_training_engines_take_the_temperature_alone() -> None:
    for given in ({"greedy": True}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}):
        with pytest.raises(ConfigError, match="temperature alone"):
            engine(weights(0)).acquire(Request(key=keys(1)[0], **given))
    for given in ({"temperature": 0.0}, {"top_k": -1}, {"top_p": 0.0}, {"greedy": True, "min_p": 0.1}):
        with pytest.raises(ConfigError, match=r"request\.(temperature|top_k|top_p|min_p)"):
            Request(key=keys(1)[0], **given)

from __future__ import annotations

import numpy as np
import pytest

from tests.support.run_factory import tiny_config
from tunix_core import paths
from tunix_core.errors import CorruptObject
from tunix_core.evaluation import held_out
from tunix_core.evaluation.held_out import Outcome, bootstrap_interval, evaluation_digest, read_evaluations
from tunix_core.storage.store import open_store


def outcomes(successes: list[bool]) -> list[Outcome]:
    return [
        Outcome(
            task_seed=i,
            reward=float(ok),
            success=ok,
            num_turns=2,
            num_tokens=30,
            finish_reason="completed",
            messages=[{"role": "prompt", "content": f"find {i}"}],
        )
        for i, ok in enumerate(successes)
    ]


def write(store, version: int, successes: list[bool], *, digest: str = "d0", created_at: float = 1.0):
    return held_out.write_evaluation(
        store,
        version,
        outcomes(successes),
        digest=digest,
        seed=0,
        policy_manifest=f"policies/{version:08d}/MANIFEST.json",
        created_at=created_at,
    )


def test_bootstrap_agrees_with_the_normal_approximation():
    rng = np.random.default_rng(1)
    sample = (rng.random(400) < 0.3).astype(float)
    found = bootstrap_interval(sample, seed=0)
    p = sample.mean()
    half = 1.96 * np.sqrt(p * (1 - p) / 400)
    assert found.value == p
    assert found.n == 400
    assert found.low == pytest.approx(p - half, abs=0.004)
    assert found.high == pytest.approx(p + half, abs=0.004)


def test_bootstrap_against_a_loop():
    sample = np.array([0.1, 1.7, 0.9, -0.4, 2.3])
    found = bootstrap_interval(sample, seed=3, num_resamples=200)
    rng = np.random.default_rng(3)
    means = [np.mean([sample[i] for i in row]) for row in rng.integers(0, 5, (200, 5))]
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])))


def test_bootstrap_is_seeded_and_covers_the_value():
    sample = np.array([0.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    assert bootstrap_interval(sample, seed=1) == bootstrap_interval(sample, seed=1)
    assert bootstrap_interval(np.ones(50), seed=0).low == 1.0
    assert np.isnan(bootstrap_interval(np.zeros(0), seed=0).value)


def test_what_is_written_is_read(tmp_path):
    store = open_store(str(tmp_path))
    written = write(store, 3, [True, False, True, True])
    found = read_evaluations(store)
    assert list(found) == [3]
    assert found[3] == written
    assert found[3].success.value == 0.75
    assert found[3].transcripts[1]["messages"] == [{"role": "prompt", "content": "find 1"}]
    rows = held_out.read_outcomes(store, written).to_pylist()
    assert [row["success"] for row in rows] == [True, False, True, True]
    assert {row["policy_version"] for row in rows} == {3}


def test_the_same_inputs_are_written_once(tmp_path):
    store = open_store(str(tmp_path))
    first = write(store, 0, [True, False])
    assert held_out.is_evaluated(store, 0, "d0")
    assert not held_out.is_evaluated(store, 0, "d1")
    assert write(store, 0, [True, True], created_at=9.0) == first


def test_of_two_evaluations_of_a_version_the_newer_counts(tmp_path):
    store = open_store(str(tmp_path))
    write(store, 0, [True], digest="new", created_at=2.0)
    write(store, 0, [False], digest="old", created_at=1.0)
    assert read_evaluations(store)[0].success.value == 1.0


def test_without_its_manifest_an_evaluation_does_not_exist(tmp_path):
    store = open_store(str(tmp_path))
    folder = write(store, 0, [True, False]).folder
    store.delete(folder + paths.MANIFEST)
    assert read_evaluations(store) == {}
    write(store, 0, [True, False])
    assert read_evaluations(store)[0].success.n == 2


def test_changed_bytes_are_refused(tmp_path):
    store = open_store(str(tmp_path))
    written = write(store, 0, [True])
    store.put(written.folder + "part.parquet", b"PAR1")
    with pytest.raises(CorruptObject, match=r"part\.parquet: received sha256"):
        held_out.read_outcomes(store, written)
    store.put(written.folder + "transcripts.json", b"[]")
    with pytest.raises(CorruptObject, match=r"transcripts\.json: received sha256"):
        read_evaluations(store)


def test_the_digest_names_weights_tasks_and_what_a_rollout_depends_on():
    config = tiny_config()
    same = evaluation_digest(tiny_config(num_steps=9), "w", [1, 2])
    assert evaluation_digest(config, "w", [1, 2]) == same, "the number of steps changes no rollout"
    different = [
        evaluation_digest(config, "v", [1, 2]),
        evaluation_digest(config, "w", [1, 3]),
        evaluation_digest(tiny_config(**{"actor.max_turns": 3}), "w", [1, 2]),
        evaluation_digest(tiny_config(**{"environment.options.num_digits": 2}), "w", [1, 2]),
    ]
    assert len({same, *different}) == 5

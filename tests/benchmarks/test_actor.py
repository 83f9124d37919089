"""The actor's benchmark's own logic: its requests, weights, bound, checks and goals. Nothing here is timed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.benchmarks import generation_rate, tool_rollouts
from tests.benchmarks.figures import Sample, shortfalls
from tests.benchmarks.generation_bound import needs, step_weights
from tests.benchmarks.generation_rate import OURS, Judge, deviation, goals_of, greedy_agreement
from tests.benchmarks.generation_work import (
    EQUAL_NEW,
    MEAN_NEW,
    NEW_RANGE,
    NUM_RESERVED,
    Requests,
    make_requests,
    make_weights,
    save,
)
from tests.benchmarks.peers.our_engine import actor_config, answer, make_engine
from tests.benchmarks.peers.requests import Request, Work, padded_left, read_work, rows_computed
from tests.benchmarks.tool_rollouts import TOKENIZER, tokens_to_read, weights_that_stop
from tunix_core.actor.engine import Engine
from tunix_core.config import ActorConfig, ModelConfig
from tunix_core.models import decoder
from tunix_core.models.parameters import abstract_parameters

TINY = ModelConfig(
    vocab_size=300, model_width=32, num_layers=2, num_heads=2, num_kv_heads=1, head_width=16, mlp_width=48
)


# ---- requests -----------------------------------------------------------------------------------


def test_agentic_answers_have_their_mean_and_a_long_tail() -> None:
    requests = make_requests("agentic", 256, 8192)
    assert requests.num_new.mean() == pytest.approx(MEAN_NEW, rel=0.05)
    assert requests.num_new.max() == NEW_RANGE[1]
    assert np.median(requests.num_new) < 0.7 * MEAN_NEW
    assert requests.prompt_tokens.min() >= NUM_RESERVED
    assert sorted(requests.num_new) == sorted(make_requests("agentic", 256, 8192, seed=5).num_new)


def test_equal_requests_are_equal() -> None:
    requests = make_requests("equal", 8, 300)
    assert set(map(len, requests.prompts())) == {requests.longest - EQUAL_NEW}
    assert len(set(map(tuple, requests.prompts()))) == 8


def test_contestants_read_what_was_saved(tmp_path: Path) -> None:
    requests = make_requests("agentic", 5, TINY.vocab_size)
    params = make_weights(TINY)
    save(tmp_path, TINY, requests, 2, params)
    work = read_work(tmp_path)
    assert [request.prompt for request in work.requests] == requests.prompts()
    assert [request.num_new for request in work.requests] == requests.num_new.tolist()
    assert [len(batch) for batch in work.batches] == [2, 2, 1]
    assert work.settings["model"]["model_width"] == TINY.model_width
    np.testing.assert_array_equal(work.tensors["head"], params["head"])


def test_a_static_batch_computes_rows_to_its_longest_answer() -> None:
    requests = [Request([2], num_new) for num_new in (3, 9, 4, 4, 7)]
    assert rows_computed(Work({"batch": 2}, {}, requests)) == 2 * 9 + 2 * 4 + 7


def test_prompts_are_padded_on_the_left() -> None:
    ids, real = padded_left([[5, 6, 7], [8]], 0)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert real.tolist() == [[True, True, True], [False, False, True]]


# ---- weights and answers ------------------------------------------------------------------------


def _logits(params: Any) -> np.ndarray:
    tokens = np.random.default_rng(1).integers(NUM_RESERVED, TINY.vocab_size, (4, 32), np.int32)
    positions = np.broadcast_to(np.arange(32, dtype=np.int32), tokens.shape)
    hidden = decoder.hidden_states(params, TINY, tokens, positions, np.ones_like(tokens))
    return np.asarray(hidden @ params["head"])


def test_reserved_ids_are_never_drawn_and_the_rest_is_not_uniform() -> None:
    probabilities = np.asarray(jax.nn.softmax(_logits(make_weights(TINY)), axis=-1))
    assert probabilities[..., :NUM_RESERVED].max() == 0
    assert probabilities.max(axis=-1).mean() > 3 / TINY.vocab_size


def test_policies_that_stop_do_so_at_the_rate_they_should() -> None:
    probabilities = np.asarray(jax.nn.softmax(_logits(weights_that_stop(TINY, 20.0)), axis=-1))
    assert probabilities[..., TOKENIZER.end_of_turn].mean() == pytest.approx(1 / 20, rel=0.2)


def test_our_engine_answers_as_asked_and_the_judge_agrees() -> None:
    params = make_weights(TINY)
    prompts, num_new = np.array([5, 9, 4]), np.array([6, 3, 11])
    tokens = np.random.default_rng(0).integers(NUM_RESERVED, TINY.vocab_size, prompts.sum(), np.int32)
    requests = Requests(prompts, tokens, num_new)
    work = [Request(*pair) for pair in zip(requests.prompts(), num_new.tolist(), strict=True)]
    engine = make_engine(TINY, actor_config(2, requests.longest, 11), params)
    answers, logprobs = asyncio.run(answer(engine, work, 0))
    assert [len(ids) for ids in answers] == num_new.tolist()
    judged, entropies = Judge(TINY, params, requests)(answers)
    for own, found in zip(logprobs, judged, strict=True):
        np.testing.assert_allclose(own, found, atol=1e-4)
    assert deviation(judged, entropies) < generation_rate.MAX_DEVIATION


def test_our_greedy_answers_are_the_likeliest_tokens() -> None:
    params = make_weights(TINY)
    prompts, num_new = np.array([5, 9]), np.array([4, 4])
    tokens = np.random.default_rng(0).integers(NUM_RESERVED, TINY.vocab_size, prompts.sum(), np.int32)
    requests = Requests(prompts, tokens, num_new)
    work = [Request(*pair) for pair in zip(requests.prompts(), num_new.tolist(), strict=True)]
    engine = make_engine(TINY, actor_config(2, requests.longest, 4, num_sizes=1), params, sampling="greedy")
    answers, _ = asyncio.run(answer(engine, work, 0, greedy=True))
    for prompt, ids in zip(requests.prompts(), answers, strict=True):
        whole = np.array([prompt + ids], np.int32)
        positions = np.arange(whole.shape[1], dtype=np.int32)[None]
        hidden = decoder.hidden_states(params, TINY, *map(jnp.asarray, (whole, positions, np.ones_like(whole))))
        likeliest = np.asarray(hidden @ params["head"])[0].argmax(-1)
        assert ids == likeliest[len(prompt) - 1 : -1].tolist()


def test_draws_of_another_distribution_are_seen() -> None:
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.full(50, 0.3), 2000)
    entropies = -(probabilities * np.log(np.maximum(probabilities, 1e-300))).sum(-1)
    drawn = [rng.choice(50, p=row) for row in probabilities]
    cold = probabilities**1.3 / (probabilities**1.3).sum(-1, keepdims=True)
    of_cold = [rng.choice(50, p=row) for row in cold]

    def score(tokens: list[int]) -> float:
        return deviation([np.log(probabilities[np.arange(2000), tokens])], [entropies])

    assert score(drawn) < generation_rate.MAX_DEVIATION < score(of_cold)


def test_greedy_agreement_counts_the_worst_with_the_others() -> None:
    assert greedy_agreement({OURS: [[1, 2], [3, 4]], "a": [[1, 2], [3, 4]], "b": [[1, 2], [9, 4]]}) == 7 / 8


# ---- the bound ----------------------------------------------------------------------------------


def test_needs_equal_a_count_over_every_token() -> None:
    requests = Requests(np.array([3, 2]), np.zeros(5, np.int32), np.array([4, 2]))
    need = needs(TINY, requests, batch=2)
    shapes = abstract_parameters(TINY)
    layers = sum(leaf.size for leaf in jax.tree.leaves(shapes["blocks"]) if len(leaf.shape) == 3)
    head = shapes["head"].size
    assert step_weights(TINY) == layers + head
    heads, kv_heads = TINY.num_heads * TINY.head_width, TINY.num_kv_heads * TINY.head_width
    flops = cache_bytes = steps = 0
    for prompt, num_new in ((3, 4), (2, 2)):
        flops += 2 * prompt * layers + 2 * head
        flops += TINY.num_layers * sum(4 * heads * (query + 1) for query in range(prompt))
        for position in range(prompt, prompt + num_new - 1):
            flops += 2 * (layers + head) + TINY.num_layers * 4 * heads * (position + 1)
            cache_bytes += 4 * TINY.num_layers * 2 * kv_heads * (position + 1)
            steps += 1
    assert need.flops == flops
    assert need.num_steps == steps / 2
    assert need.bytes_read == cache_bytes + 4 * (layers + head) * steps / 2


# ---- slow tools ---------------------------------------------------------------------------------


def test_sessions_that_wait_keep_their_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_rollouts, "TOOL_SECONDS", 0.01)
    actor = ActorConfig(
        num_slots=4, context_tokens=256, max_turns=2, max_turn_tokens=60, decode_rows=2, prefill_tokens=32
    )
    engine = Engine(TINY, actor, weights_that_stop(TINY, 6.0), 0, end_of_turn=TOKENIZER.end_of_turn)
    figures = asyncio.run(tool_rollouts.play_scheduled(engine, 6))
    assert figures["num_failures"] == 0
    assert figures["recomputed_tokens"] == 0
    assert figures["prefill_tokens"] == figures["expected_prefill"]
    assert figures["most_parked"] >= 1
    waited = asyncio.run(tool_rollouts.play_waiting(engine, 6))
    assert waited["prefill_tokens"] == pytest.approx(figures["prefill_tokens"], rel=0.2)
    assert engine.num_free == 4


def test_an_answer_is_read_with_the_mark_before_it() -> None:
    class Turn:
        def __init__(self, role: str, start: int, end: int) -> None:
            self.role, self.start, self.end = role, start, end

    class Episode:
        turns = (Turn("prompt", 0, 10), Turn("policy", 10, 17), Turn("tool", 17, 20), Turn("policy", 20, 22))

    assert tokens_to_read(Episode()) == 10 + 3 + 1  # type: ignore[arg-type]


# ---- goals --------------------------------------------------------------------------------------


def _case(**ratios: float) -> dict[str, Any]:
    return {
        "name": "small, agentic lengths, batch 32",
        "kind": "agentic",
        "ours_over": {name: Sample.of([ratio]) for name, ratio in ratios.items()},
        "greedy_agreement": 1.0 if ratios else None,
        "deviations": {OURS: 1.0},
        "logprob_difference": 1e-6,
        "other_load_cpus": 0.0,
    }


def test_the_faster_peer_decides() -> None:
    assert [goal.met for goal in goals_of(_case(tunix=9.0, hugging_face=2.9))] == [False, True, True, True, True]
    assert not shortfalls(goals_of(_case(tunix=9.0, hugging_face=3.1)))


def test_without_peers_their_goals_are_not_met() -> None:
    missed = shortfalls(goals_of(_case()))
    assert len(missed) == 2
    assert all("make bench-peers" in line for line in missed)

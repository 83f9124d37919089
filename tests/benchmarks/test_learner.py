"""The benchmark's own logic: its figures, goals, turns and layouts. Nothing here is timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.benchmarks import learner, parts, train_rate
from tests.benchmarks.figures import Goal, Sample, shortfalls, time_calls
from tests.benchmarks.peers.padding import (
    batch_padded_microbatches,
    even_rows,
    prompts_and_completions,
    sorted_microbatches,
)
from tests.benchmarks.peers.turns import Contestant, ContestantFailed, take_turns
from tests.benchmarks.utilisation import bound, forward_flops
from tests.benchmarks.workload import (
    MAX_TOKENS,
    MEAN_TOKENS,
    MIN_TOKENS,
    MODELS,
    agentic_lengths,
    count_parameters,
    make_trajectories,
)
from tunix_core.models.decoder import abstract_parameters

# ---- figures ------------------------------------------------------------------------------------


def test_sample_is_median_and_spread() -> None:
    sample = Sample.of(iter([4.0, 1.0, 3.0]))
    assert sample == (3.0, 1.0, 4.0, 3)
    assert sample.inverse(12) == (4.0, 3.0, 12.0, 3)
    assert f"{sample:.1f}" == "3.0 (1.0 to 4.0)"


def test_time_calls_leaves_the_first_out() -> None:
    calls: list[int] = []
    assert time_calls(lambda: calls.append(1), seconds=0, at_least=4).num == 4
    assert len(calls) == 5


@pytest.mark.parametrize(
    ("value", "at_least", "met"),
    [
        (2.0, True, True),
        (1.9, True, False),
        (2.0, False, True),
        (2.1, False, False),
        (None, True, False),
        (None, False, False),
    ],
)
def test_goal_is_met_up_to_its_bound(value: float | None, at_least: bool, met: bool) -> None:
    assert Goal("ratio", value, 2.0, at_least).met is met


def test_shortfalls_name_what_is_missed_and_what_to_do() -> None:
    goals = [
        Goal("a", 3.0, 2.0, True),
        Goal("b", 1.5, 2.0, True, "unused"),
        Goal("c", None, 0.125, False, "Run make bench-peers first."),
    ]
    assert shortfalls(goals) == [
        "goal missed: b: 1.5, at least 2",
        "goal missed: c: not measured, at most 0.125. Run make bench-peers first.",
    ]


def _scripted(value: float) -> dict[str, parts.Part]:
    def measure(*, quick: bool) -> tuple[dict[str, object], list[Goal]]:
        return {"value": value, "quick": quick}, [Goal("value", value, 2.0, True)]

    return {"one": parts.Part(measure, lambda figures: print(figures["value"]))}


@pytest.mark.parametrize(("value", "code"), [(2.5, 0), (1.5, parts.EXIT_GOAL_MISSED)])
def test_check_fails_where_a_goal_is_missed(
    value: float, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNIX_COMPILATION_CACHE", "")
    kept = tmp_path / "figures.json"
    assert learner.main(["--check", "--quick", "--json", str(kept)], _scripted(value)) == code
    assert ("goal missed: value: 1.5" in capsys.readouterr().err) is (code != 0)
    written = json.loads(kept.read_text())
    assert written["figures"]["one"]["value"] == value
    assert written["figures"]["one"]["quick"] is True
    assert written["goals"][0]["bound"] == 2.0


# ---- work ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_counted_as_the_model_has_them(name: str) -> None:
    model = MODELS[name]
    assert count_parameters(model) == sum(leaf.size for leaf in jax.tree.leaves(abstract_parameters(model)))


def test_the_middle_model_has_four_and_a_half_million() -> None:
    assert count_parameters(MODELS["4.5M"]) == pytest.approx(4.5e6, rel=0.01)


def test_lengths_are_the_distribution_s_quantiles() -> None:
    lengths = agentic_lengths(2000, 0)
    assert lengths.mean() == pytest.approx(MEAN_TOKENS, rel=0.02)
    assert lengths.min() >= MIN_TOKENS
    assert lengths.max() == MAX_TOKENS
    assert sorted(lengths) == sorted(agentic_lengths(2000, 1))
    assert lengths.tolist() != agentic_lengths(2000, 1).tolist()


def test_flops_equal_a_count_over_every_pair() -> None:
    model, lengths = MODELS["small"], np.array([3, 5])
    flops = forward_flops(model, lengths)
    pairs = sum(1 for n in lengths for query in range(n) for key in range(n) if key <= query)
    heads = model.num_heads * model.head_width
    # Scores and mixture: 2 FLOPs per pair and number of a head, each.
    assert flops.attention == model.num_layers * pairs * heads * 2 * 2
    shapes = abstract_parameters(model)["blocks"]
    weights = sum(leaf.size for leaf in jax.tree.leaves(shapes) if len(leaf.shape) == 3)
    assert flops.dense == 2 * 8 * weights
    assert flops.head == 2 * 8 * model.model_width * model.vocab_size


def test_bound_names_the_longest_part() -> None:
    figures = {
        "seconds": Sample.of([4.0]),
        "parts": {"attention": 3.0, "optimizer": 0.5},
        "parts_of_peak": {"attention": 0.25},
    }
    assert bound(figures) == "bound by attention: 75% of the update, at 25% of the matmul peak"
    figures["parts"]["optimizer"] = 3.5
    assert bound(figures) == "bound by optimizer: 88% of the update, which multiplies nothing"


# ---- peers --------------------------------------------------------------------------------------


def test_microbatches_as_trl_lays_them_out() -> None:
    assert batch_padded_microbatches(5, 2) == [[0, 1], [2, 3], [4]]


def test_sorted_microbatches_stay_within_the_budget() -> None:
    lengths = np.array([10, 3, 50, 7, 8, 120])
    batches = sorted_microbatches(lengths, 60)
    assert batches == [[5], [2], [0, 4, 3, 1]]  # 120 alone is over, and still goes


@pytest.mark.parametrize(("num", "length", "expected"), [(12, 10, 4), (12, 60, 1), (7, 10, 1), (12, 1, 12)])
def test_even_rows(num: int, length: int, expected: int) -> None:
    assert even_rows(num, length, 50) == expected


def test_prompts_and_completions_hold_every_token_once() -> None:
    trajectories = make_trajectories(np.array([9, 4, 17]), 50, 0)
    laid = prompts_and_completions({f"trajectory.{k}": v for k, v in vars(trajectories).items()}, 0)
    offsets = np.cumsum(trajectories.lengths) - trajectories.lengths
    for row, (offset, length) in enumerate(zip(offsets, trajectories.lengths, strict=True)):
        own = slice(offset, offset + length)
        whole = np.concatenate([laid["prompt_ids"][row], laid["completion_ids"][row]])
        assert whole[whole != 0].tolist() == trajectories.tokens[own].tolist()
        num_prompt = int(laid["prompt_mask"][row].sum())
        assert laid["prompt_mask"][row, -num_prompt:].all(), "padded on the left"
        assert num_prompt == trajectories.loss_mask[own].argmax()
        num_completion = length - num_prompt
        assert (
            laid["completion_mask"][row, :num_completion].tolist() == trajectories.loss_mask[own][num_prompt:].tolist()
        )
        assert not laid["completion_mask"][row, num_completion:].any()
        np.testing.assert_array_equal(
            laid["old_per_token_logps"][row, :num_completion], trajectories.behavior_logprobs[own][num_prompt:]
        )


_FAKE = """
import sys
from tests.benchmarks.peers.turns import serve
calls = []
def update():
    print("not an answer")
    calls.append(1)
    if len(calls) > int(sys.argv[2]):
        raise SystemExit("out of updates")
    open(sys.argv[3], "a").write(sys.argv[1])
    return {"loss": float(len(calls))}
serve(update, {"layout": sys.argv[1]})
"""


def _fake(name: str, log: Path, limit: int = 99) -> Contestant:
    return Contestant(name, [sys.executable, "-c", _FAKE, name, str(limit), str(log)])


def test_contestants_take_turns(tmp_path: Path) -> None:
    log = tmp_path / "order"
    with _fake("a", log) as first:
        assert first.about() == {"layout": "a", "warm_up": {"loss": 1.0}}
        with _fake("b", log) as second:
            second.about()
            answers = take_turns([first, second], 3)
    assert log.read_text() == "ab" + "ab" + "ba" + "ab"
    assert [answer["loss"] for answer in answers["b"]] == [2.0, 3.0, 4.0]
    assert all(answer["seconds"] >= 0 for answer in answers["a"])


def test_a_failed_contestant_says_why(tmp_path: Path) -> None:
    with _fake("a", tmp_path / "order", limit=1) as contestant:
        contestant.about()
        with pytest.raises(ContestantFailed, match=r"(?s)a: ended with 1.*out of updates"):
            contestant.measure()


def test_the_faster_peer_decides() -> None:
    figures = {
        "model": "small",
        "ours_over": {
            train_rate.TUNIX: Sample.of([9.0]),
            train_rate.TRL: Sample.of([1.5, 1.8, 1.6]),
            train_rate.TORCH: Sample.of([0.8]),
        },
        "loss_difference": 1e-7,
        "other_load_cpus": 0.0,
    }
    assert [goal.met for goal in train_rate.goals_of(figures)] == [False, True, True]
    assert train_rate.goals_of(figures)[0].value == 1.6


def test_without_peers_their_goals_are_not_met() -> None:
    figures = {"model": "small", "ours_over": {}, "loss_difference": None, "other_load_cpus": 0.0}
    missed = shortfalls(train_rate.goals_of(figures))
    assert len(missed) == 2
    assert all("make bench-peers" in line for line in missed)


def test_loss_difference_is_relative_to_the_largest() -> None:
    assert train_rate.relative_difference([2.0, -4.0], [2.0, -4.4]) == pytest.approx(0.1)

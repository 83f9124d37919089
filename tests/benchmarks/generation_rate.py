"""Kept tokens/s of our engine, google-tunix's sampler and Hugging Face `generate`: same model, weights, requests, machine.

A measurement answers all requests, `batch` at a time, from ids on the host to ids on the host, in float32 at temperature
1 on as many threads as there are CPUs. Only the tokens that were asked for count. The peers take static batches in
the order of arrival, each of which ends with its longest answer; our engine refills a slot when its answer ends.
Sorting would help nobody: prompts are short, and how long an answer gets is not known before.

Checked in the same run: greedy answers are equal token by token, and the mean log-probability of what each drew
lies where the model's own entropy puts it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tests.benchmarks.figures import Goal, Sample
from tests.benchmarks.generation_bound import bound_of
from tests.benchmarks.generation_work import (
    KINDS,
    MODELS,
    Kind,
    Requests,
    make_requests,
    make_weights,
    save,
)
from tests.benchmarks.machine import OtherLoad
from tests.benchmarks.peers.turns import Contestant, take_turns
from tests.benchmarks.train_rate import MAX_OTHER_LOAD, PEER_PYTHON
from tests.benchmarks.utilisation import matmul_peak
from tunix_core.config import ModelConfig
from tunix_core.models import decoder

OURS, TUNIX, HUGGING_FACE = "tunix-airflow", "google-tunix", "Hugging Face"
BATCHES = (16, 32, 64)
GOALS: dict[Kind, float] = {"equal": 1.0, "agentic": 3.0}
"""Over the faster peer."""
MAX_DEVIATION = 5.0
"""Standard errors between the mean log-probability of what was drawn and minus the entropy."""
CHECKED_REQUESTS = 64


class Case(NamedTuple):
    model: str
    kind: Kind
    batch: int
    requests_per_place: int
    """Batches that a static library would make of them."""
    num_rounds: int

    def __str__(self) -> str:
        return f"{self.model}, {self.kind} lengths, batch {self.batch}"


def commands(folder: Path) -> dict[str, list[str]]:
    """All contestants, or ours alone where there is no environment of the peers."""
    threads = str(len(os.sched_getaffinity(0)))  # XLA takes as many by itself
    found = {OURS: [sys.executable, "-m", "tests.benchmarks.peers.our_engine", str(folder)]}
    if PEER_PYTHON.exists():
        found[HUGGING_FACE] = [str(PEER_PYTHON), "-m", "tests.benchmarks.peers.hf_generate", str(folder), threads]
        found[TUNIX] = [str(PEER_PYTHON), "-m", "tests.benchmarks.peers.tunix_sampler", str(folder)]
    return found


class Judge:
    """What the model says of drawn tokens, by the packed pass that the learner uses."""

    def __init__(self, model: ModelConfig, params: decoder.Params, requests: Requests) -> None:
        self._params = params
        self._requests = requests
        self._prompts = requests.prompts()[:CHECKED_REQUESTS]

        @jax.jit
        def judge(params: decoder.Params, tokens: jax.Array, segments: jax.Array) -> tuple[jax.Array, jax.Array]:
            positions = jax.numpy.broadcast_to(jax.numpy.arange(tokens.shape[1]), tokens.shape)
            hidden = decoder.hidden_states(params, model, tokens, positions, segments)
            return decoder.token_logprobs(params, model, hidden[:, :-1], tokens[:, 1:], 1.0)

        self._judge = judge

    def __call__(self, answers: list[list[int]]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Log-probabilities of the first answers' tokens, and the entropies before them."""
        logprobs, entropies = [], []
        for prompt, answer in zip(self._prompts, answers, strict=False):
            tokens = np.zeros((1, self._requests.longest), np.int32)
            length = len(prompt) + len(answer)
            tokens[0, :length] = prompt + answer
            segments = (np.arange(tokens.shape[1]) < length).astype(np.int32)[None]
            own = slice(len(prompt) - 1, length - 1)
            found = self._judge(self._params, tokens, segments)
            for kept, values in zip((logprobs, entropies), found, strict=True):
                kept.append(np.asarray(values)[0, own])
        return logprobs, entropies


def deviation(logprobs: list[np.ndarray], entropies: list[np.ndarray]) -> float:
    """|mean(log p + entropy)| in standard errors: a token's log-probability is minus the entropy on average."""
    excess = np.concatenate(logprobs) + np.concatenate(entropies)
    return float(abs(excess.mean()) / (excess.std() / np.sqrt(len(excess))))


def greedy_agreement(greedy: dict[str, list[list[int]]]) -> float:
    """Share of tokens, over all peers, that equal ours."""
    ours = np.concatenate(greedy[OURS])
    return float(np.mean([np.concatenate(theirs) == ours for name, theirs in greedy.items() if name != OURS]))


def measure_case(case: Case, peak: float) -> dict[str, Any]:
    model = MODELS[case.model]
    requests = make_requests(case.kind, case.requests_per_place * case.batch, model.vocab_size)
    params = make_weights(model)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
        save(folder, model, requests, case.batch, params)
        bound = bound_of(model, requests, case.batch, peak)
        contestants, about = [], {}
        for name, command in commands(folder).items():  # one by one, so that none compiles while another does
            contestant = stack.enter_context(Contestant(name, command, {"JAX_PLATFORMS": "cpu"}))
            about[name] = contestant.about()
            contestants.append(contestant)
        load = OtherLoad()
        answers = take_turns(contestants, case.num_rounds)
        others = load.cpus(sum(answer["cpu_seconds"] for each in answers.values() for answer in each))
    judge = Judge(model, params, requests)
    judged = {name: judge(each[-1]["tokens"]) for name, each in answers.items()}
    own = np.concatenate([np.array(row) for row in answers[OURS][-1]["logprobs"][:CHECKED_REQUESTS]])
    seconds = {name: [answer["seconds"] for answer in each] for name, each in answers.items()}
    cpu_seconds = {name: [answer["cpu_seconds"] for answer in each] for name, each in answers.items()}
    greedy = {name: each.pop("warm_up")["greedy"] for name, each in about.items()}
    return {
        **case._asdict(),
        "name": str(case),
        "num_requests": len(requests.num_new),
        "num_kept": requests.num_kept,
        "longest_answer": int(requests.num_new.max()),
        "about": about,
        "kept_tokens_per_second": {
            name: Sample.of(requests.num_kept / s for s in each) for name, each in seconds.items()
        },
        # Per round, so that what slowed the machine slowed both.
        "ours_over": {
            name: Sample.of(b / a for a, b in zip(seconds[OURS], each, strict=True))
            for name, each in seconds.items()
            if name != OURS
        },
        # Not moved by others on the same CPUs, except through the caches.
        "ours_over_per_cpu_second": {
            name: Sample.of(b / a for a, b in zip(cpu_seconds[OURS], each, strict=True))
            for name, each in cpu_seconds.items()
            if name != OURS
        },
        "bound_seconds": bound.seconds,
        "bound_by": bound.kind,
        "of_bound": {name: bound.seconds / Sample.of(each).median for name, each in seconds.items()},
        "deviations": {name: deviation(*each) for name, each in judged.items()},
        "mean_logprobs": {name: float(np.concatenate(each[0]).mean()) for name, each in judged.items()},
        "logprob_difference": float(abs(own - np.concatenate(judged[OURS][0])).max()),
        "greedy_agreement": greedy_agreement(greedy) if len(greedy) > 1 else None,
        "other_load_cpus": others,
    }


MAX_LOGPROB_DIFFERENCE = 1e-3


def goals_of(figures: dict[str, Any]) -> list[Goal]:
    name, remedy = figures["name"], "Run make bench-peers first."
    ratio = min((ratio.median for ratio in figures["ours_over"].values()), default=None)
    return [
        Goal(f"kept tokens/s, ours over the faster peer: {name}", ratio, GOALS[figures["kind"]], True, remedy),
        Goal(f"greedy tokens equal to ours: {name}", figures["greedy_agreement"], 1.0, True, remedy),
        Goal(
            f"standard errors of drawn log-probabilities, the worst contestant: {name}",
            max(figures["deviations"].values()),
            MAX_DEVIATION,
            False,
        ),
        Goal(
            f"our log-probabilities against the packed pass: {name}",
            figures["logprob_difference"],
            MAX_LOGPROB_DIFFERENCE,
            False,
        ),
        Goal(f"CPUs that others used: {name}", figures["other_load_cpus"], MAX_OTHER_LOAD, False),
    ]


def measure(*, quick: bool) -> tuple[dict[str, Any], list[Goal]]:
    cases = (
        [Case("small", kind, 16, 2, 1) for kind in KINDS]
        if quick
        else [Case(model, kind, batch, 4, 3) for model in MODELS for kind in KINDS for batch in BATCHES]
    )
    peak = matmul_peak()
    measured = [measure_case(case, peak) for case in cases]
    figures = {"matmul_peak_flops_per_second": peak, "cases": measured}
    return figures, [goal for case in measured for goal in goals_of(case)]


def report(figures: dict[str, Any]) -> None:
    print(
        f"\nGeneration in float32; the matmul peak is {figures['matmul_peak_flops_per_second'] / 1e9:.0f} GFLOP/s here"
    )
    for case in figures["cases"]:
        print(
            f"\n{case['name']}: {case['num_requests']} requests, {case['num_kept']} tokens kept, the longest answer "
            f"{case['longest_answer']}; bound by {case['bound_by']} to {case['num_kept'] / case['bound_seconds']:.0f} "
            f"tokens/s; others used {case['other_load_cpus']:.2f} CPUs"
        )
        print(
            f"{'':16}{'kept tok/s':>11}{'lowest':>9}{'highest':>9}{'of bound':>10}{'ours over it':>24}{'per CPU-second':>16}  layout"
        )
        for name, rate in case["kept_tokens_per_second"].items():
            ratio, about = case["ours_over"].get(name), case["about"][name]
            of_cpu = case["ours_over_per_cpu_second"].get(name)
            wasted = f", {case['num_kept'] / about['rows']:.0%} of its rows kept" if "rows" in about else ""
            print(
                f"{name:16}{rate.median:>11.0f}{rate.low:>9.0f}{rate.high:>9.0f}{case['of_bound'][name]:>10.1%}"
                f"{format(ratio, '.2f') if ratio else '1':>24}{format(of_cpu.median, '.2f') if of_cpu else '1':>16}"
                f"  {about['layout']}{wasted}"
            )
        agreement = case["greedy_agreement"]
        print(
            f"greedy tokens equal: {'not compared' if agreement is None else format(agreement, '.1%')}; drawn "
            + ", ".join(
                f"{name} {mean:.3f} ({case['deviations'][name]:.1f} standard errors off)"
                for name, mean in case["mean_logprobs"].items()
            )
        )

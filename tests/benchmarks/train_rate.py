"""Train tokens/s of our step against google-tunix and plain PyTorch: same model, weights, trajectories and machine.

A measurement is one optimizer update over the whole batch, from host arrays to a loss that has come back; what each does to lay the batch out is inside. Only real tokens count. The numbers of trajectories
are such that windows are nearly full, as they are in a batch of hundreds.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.benchmarks.figures import Goal, Sample
from tests.benchmarks.machine import OtherLoad
from tests.benchmarks.peers.turns import Contestant, take_turns
from tests.benchmarks.utilisation import PASSES, forward_flops, matmul_peak
from tests.benchmarks.workload import (
    MODELS,
    Trajectories,
    agentic_lengths,
    count_parameters,
    make_trajectories,
    run_config,
    save,
)
from tunix_core.models.decoder import flatten_parameters, init_parameters

PEER_PYTHON = Path(".venv-peers/bin/python")
"""What `make bench-peers` builds."""
OURS, TORCH, TRL, TUNIX = "tunix-airflow", "PyTorch, sorted", "PyTorch as TRL", "google-tunix"
GOAL_RATIO = 2.0
"""Over google-tunix and over a plain PyTorch loop that lays the batch out as TRL does. A loop that sorts by length and
tunes its micro-batches is measured beside them: at over half of the matmul peak nothing is twice as fast."""
GOAL_PEERS = (TUNIX, TRL)
MAX_LOSS_DIFFERENCE = 1e-3
"""Between our losses and PyTorch's, relative, over the first updates: the mathematics are the same."""
MAX_OTHER_LOAD = 0.2
"""CPUs that other processes may use while we measure."""


def commands(folder: Path) -> dict[str, list[str]]:
    """All contestants, or ours alone where there is no environment of the peers."""
    threads = str(len(os.sched_getaffinity(0)))  # XLA takes as many by itself
    found = {OURS: [sys.executable, "-m", "tests.benchmarks.peers.ours", str(folder)]}
    if PEER_PYTHON.exists():
        loop = [str(PEER_PYTHON), "-m", "tests.benchmarks.peers.torch_loop", str(folder), threads]
        found |= {TORCH: [*loop, "sorted"], TRL: [*loop, "trl"]}
        found[TUNIX] = [str(PEER_PYTHON), "-m", "tests.benchmarks.peers.tunix_grpo", str(folder)]
    return found


def _prepare(folder: Path, model_name: str, num_trajectories: int) -> Trajectories:
    """Write the work."""
    model = MODELS[model_name]
    config = run_config(model, num_trajectories)
    trajectories = make_trajectories(agentic_lengths(num_trajectories, 0), model.vocab_size, 0)
    tensors: dict[str, Any] = {}
    for owner, seed in (("policy", 0), ("reference", 1)):
        tensors |= {f"{owner}.{k}": v for k, v in flatten_parameters(init_parameters(model, seed)).items()}
    save(folder, config, trajectories, tensors)
    return trajectories


def relative_difference(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """The largest over the updates, against the largest loss."""
    pairs = list(zip(ours, theirs, strict=True))
    return max(abs(a - b) for a, b in pairs) / max(abs(a) for a, _ in pairs)


def measure_model(model_name: str, num_trajectories: int, num_rounds: int) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
        work = _prepare(folder, model_name, num_trajectories)
        peak = matmul_peak()
        environment = {"JAX_PLATFORMS": "cpu"}
        contestants, about = [], {}
        for name, command in commands(folder).items():  # one by one, so that none compiles while another does
            contestant = stack.enter_context(Contestant(name, command, environment))
            about[name] = contestant.about()
            contestants.append(contestant)
        load = OtherLoad()
        answers = take_turns(contestants, num_rounds)
        others = load.cpus(sum(answer["cpu_seconds"] for each in answers.values() for answer in each))
    seconds = {name: [answer["seconds"] for answer in each] for name, each in answers.items()}
    losses = {
        name: [about[name]["warm_up"]["loss"], *(answer["loss"] for answer in answers[name])]
        for name in (OURS, TORCH)
        if name in answers
    }
    peers = [name for name in seconds if name != OURS]
    num_tokens, flops = work.num_tokens, PASSES * forward_flops(MODELS[model_name], work.lengths).total
    rates = {name: Sample.of(num_tokens / s for s in each) for name, each in seconds.items()}
    return {
        "model": model_name,
        "num_parameters": count_parameters(MODELS[model_name]),
        "num_trajectories": num_trajectories,
        "num_tokens": num_tokens,
        "about": about,
        "losses": losses,
        "loss_difference": relative_difference(losses[OURS], losses[TORCH]) if TORCH in losses else None,
        "tokens_per_second": rates,
        "matmul_peak_flops_per_second": peak,
        "utilisation": {name: rate.median * flops / num_tokens / peak for name, rate in rates.items()},
        # Per round, so that what slowed the machine slowed both.
        "ours_over": {
            name: Sample.of(b / a for a, b in zip(seconds[OURS], seconds[name], strict=True)) for name in peers
        },
        "other_load_cpus": others,
    }


def goals_of(figures: dict[str, Any]) -> list[Goal]:
    name, ratios = figures["model"], figures["ours_over"]
    slowest = min((ratios[peer].median for peer in GOAL_PEERS if peer in ratios), default=None)
    remedy = "Run make bench-peers first."
    return [
        Goal(
            f"train tokens/s of {name}, ours over the faster of {' and '.join(GOAL_PEERS)}",
            slowest,
            GOAL_RATIO,
            True,
            remedy,
        ),
        Goal(f"loss of {name}, ours against PyTorch's", figures["loss_difference"], MAX_LOSS_DIFFERENCE, False, remedy),
        Goal(f"CPUs that others used while {name} was measured", figures["other_load_cpus"], MAX_OTHER_LOAD, False),
    ]


def measure(*, quick: bool) -> tuple[dict[str, Any], list[Goal]]:
    cases = [("4.5M", 14, 2)] if quick else [("small", 96, 7), ("4.5M", 28, 5)]
    models = [measure_model(*case) for case in cases]
    return {"models": models}, [goal for figures in models for goal in goals_of(figures)]


def report(figures: dict[str, Any]) -> None:
    for model in figures["models"]:
        print(
            f"\nTraining {model['model']} ({model['num_parameters']:,} parameters): {model['num_trajectories']} "
            f"trajectories, {model['num_tokens']} real tokens per update; others used {model['other_load_cpus']:.2f} CPUs"
        )
        print(f"{'':16}{'tokens/s':>10}{'lowest':>10}{'highest':>10}{'of peak':>9}{'ours over it':>24}  layout")
        for name, rate in model["tokens_per_second"].items():
            ratio = model["ours_over"].get(name)
            about = model["about"][name]
            print(
                f"{name:16}{rate.median:>10.0f}{rate.low:>10.0f}{rate.high:>10.0f}{model['utilisation'][name]:>9.1%}"
                f"{format(ratio, '.2f') if ratio else '1':>24}  {about['layout']}, "
                f"{model['num_tokens'] / about['padded_tokens']:.0%} real"
            )
        print(f"the matmul peak is {model['matmul_peak_flops_per_second'] / 1e9:.0f} GFLOP/s here")
        if model["loss_difference"] is not None:
            print(
                f"losses of ours and PyTorch differ by {model['loss_difference']:.1e} over {len(model['losses'][OURS])} updates"
            )

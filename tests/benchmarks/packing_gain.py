"""What packing gives: density, the packer's own rate, the step's speed-up, and no compilation after warm-up."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.benchmarks.figures import Goal, Sample
from tests.benchmarks.workload import (
    MODELS,
    WINDOW_TOKENS,
    Trajectories,
    agentic_lengths,
    make_trajectories,
    random_lengths,
    run_config,
)
from tunix_core.data.packing import best_fit, pack
from tunix_core.distributed.compilation import CompilationCounter
from tunix_core.distributed.mesh import make_mesh
from tunix_core.learner.train_step import make_train_step
from tunix_core.models.decoder import init_parameters

BUFFER_TRAJECTORIES = 512
NUM_BUFFERS = 20
GOAL_DENSITY = 0.97
GOAL_TOKENS_PER_SECOND = 20e6
NUM_BATCHES = 500
SHORT_WINDOW_TOKENS = 128
"""Of the batches that must not compile anything: what is counted does not depend on the width."""
SHORT_MAX_WINDOWS = 4


def density() -> Sample:
    """Real tokens over all of the windows' tokens, buffer by buffer."""
    buffers = [random_lengths(BUFFER_TRAJECTORIES, seed) for seed in range(NUM_BUFFERS)]
    return Sample.of(x.sum() / (best_fit(x, WINDOW_TOKENS).num_windows * WINDOW_TOKENS) for x in buffers)


def packer_rate(num_rounds: int = 10) -> Sample:
    """Tokens/s of `best_fit` and `pack` together, from concatenated trajectories to windows; a round is a few buffers."""
    vocab_size = MODELS["4.5M"].vocab_size
    buffers = [make_trajectories(random_lengths(BUFFER_TRAJECTORIES, i), vocab_size, i) for i in range(4)]
    rates = []
    for _ in range(num_rounds + 1):
        started = time.perf_counter()
        for trajectories in buffers:
            trajectories.pack(trajectories.fit())
        rates.append(sum(x.num_tokens for x in buffers) / (time.perf_counter() - started))
    return Sample.of(rates[1:])


def step_gain(model_name: str, num_trajectories: int, num_rounds: int) -> dict[str, Any]:
    """Seconds of one update over the same trajectories, packed and one per window, in turns, by one executable."""
    model = MODELS[model_name]
    config = run_config(model, num_trajectories)
    trajectories = make_trajectories(agentic_lengths(num_trajectories, 0), model.vocab_size, 0)
    layouts = {"packed": trajectories.fit(), "padded": trajectories.one_per_window()}
    step = make_train_step(config, make_mesh(config.mesh))
    step.compile(num_trajectories)
    batches = {name: step.put(trajectories.pack(layout)) for name, layout in layouts.items()}
    state, reference = step.init_state(init_parameters(model, 0)), step.put_reference(init_parameters(model, 1))
    denominator = float(trajectories.loss_mask.sum())
    taken: dict[str, list[float]] = {name: [] for name in batches}
    for turn in range(num_rounds + 1):
        for name, batch in batches.items():
            started = time.perf_counter()
            state, metrics = step(state, reference, batch, denominator)
            float(metrics["loss"])  # waits for the device
            if turn:
                taken[name].append(time.perf_counter() - started)
    return {
        "model": model_name,
        "num_trajectories": num_trajectories,
        "num_tokens": trajectories.num_tokens,
        "num_windows": {name: layout.num_windows for name, layout in layouts.items()},
        "seconds": {name: Sample.of(values) for name, values in taken.items()},
        "gain": Sample.of(b / a for a, b in zip(taken["packed"], taken["padded"], strict=True)),
    }


def _short_batches() -> Iterator[Trajectories]:
    """One to twelve trajectories of 8 to 128 tokens, as many as fit."""
    rng = np.random.default_rng(0)
    while True:
        lengths = np.clip(rng.lognormal(3.3, 1, int(rng.integers(1, 13))), 8, SHORT_WINDOW_TOKENS).astype(np.int64)
        if best_fit(lengths, SHORT_WINDOW_TOKENS).num_windows <= SHORT_MAX_WINDOWS:
            yield make_trajectories(lengths, MODELS["small"].vocab_size, int(rng.integers(2**31)))


def compilations() -> dict[str, int]:
    """Of `NUM_BATCHES` updates, packing and metrics included, each of other lengths and mostly another window count."""
    counter = CompilationCounter()
    model = MODELS["small"]
    config = run_config(model, SHORT_MAX_WINDOWS)
    learner = dataclasses.replace(config.learner, window_tokens=SHORT_WINDOW_TOKENS)
    actor = dataclasses.replace(config.actor, context_tokens=SHORT_WINDOW_TOKENS)
    config = dataclasses.replace(config, learner=learner, actor=actor)
    step = make_train_step(config, make_mesh(config.mesh))
    step.compile(SHORT_MAX_WINDOWS)
    state, reference = step.init_state(init_parameters(model, 0)), step.put_reference(init_parameters(model, 1))
    counts: set[int] = set()
    for number, batch in zip(range(NUM_BATCHES + 1), _short_batches(), strict=False):
        layout = best_fit(batch.lengths, SHORT_WINDOW_TOKENS)
        counts.add(layout.num_windows)
        arrays = pack(layout, **vars(batch), num_windows=layout.num_windows, window_tokens=SHORT_WINDOW_TOKENS)
        state, metrics = step(state, reference, step.put(arrays), float(arrays.loss_mask.sum()))
        float(metrics["loss"])
        if number == 0:
            counter.warmed_up()
    return {
        "warm_up": counter.total - counter.after_warmup,
        "after": counter.after_warmup,
        "window_counts": len(counts),
    }


def measure(*, quick: bool) -> tuple[dict[str, Any], list[Goal]]:
    figures = {
        "density": density(),
        "packer_tokens_per_second": packer_rate(),
        "compilations": compilations(),
        "steps": [step_gain("small", 14, 3)] if quick else [step_gain("small", 28, 5), step_gain("4.5M", 14, 3)],
    }
    compiled = figures["compilations"]
    goals = [
        Goal(f"density of {NUM_BUFFERS} buffers, the lowest", figures["density"].low, GOAL_DENSITY, True),
        Goal("packer tokens/s", figures["packer_tokens_per_second"].median, GOAL_TOKENS_PER_SECOND, True),
        Goal(f"compilations over {NUM_BATCHES} batches after warm-up", compiled["after"], 0, False),
        Goal("compilations counted in warm-up", compiled["warm_up"], 1, True),
    ]
    return figures, goals


def report(figures: dict[str, Any]) -> None:
    compiled = figures["compilations"]
    print(
        f"\nPacking: buffers of {BUFFER_TRAJECTORIES} trajectories into windows of {WINDOW_TOKENS}\n"
        f"density     {figures['density']:.4f}\n"
        f"packer      {figures['packer_tokens_per_second']:,.0f} tokens/s\n"
        f"compiled    {compiled['after']} after warm-up ({compiled['warm_up']} in it), over {NUM_BATCHES} batches "
        f"of {compiled['window_counts']} window counts"
    )
    for step in figures["steps"]:
        windows, seconds = step["num_windows"], step["seconds"]
        print(
            f"update of {step['model']}, {step['num_trajectories']} trajectories, {step['num_tokens']} tokens: "
            f"packed {windows['packed']} windows {seconds['packed']:.2f} s, padded {windows['padded']} windows "
            f"{seconds['padded']:.2f} s, speed-up {step['gain']:.1f}"
        )

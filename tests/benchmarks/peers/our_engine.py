"""Our policy engine on the same requests: `python -m tests.benchmarks.peers.our_engine FOLDER`.

Driven as the scheduler drives it: a request gets a slot as soon as one is free, dispatches go on between. A turn's limit
is the number of tokens asked for.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from pathlib import Path
from typing import Any

from tests.benchmarks.peers.requests import Request, read_work
from tests.benchmarks.peers.turns import serve
from tunix_core.actor.engine import Engine
from tunix_core.actor.policy_engine import Request as Sampling
from tunix_core.actor.sampling import Kind, request_key
from tunix_core.config import ActorConfig, ModelConfig
from tunix_core.config_loading import config_from_dict
from tunix_core.distributed.compilation import enable_compilation_cache
from tunix_core.models.decoder import Params, unflatten_parameters

END = 1
"""One of the ids that are never drawn."""


def actor_config(batch: int, longest: int, most_new: int, num_sizes: int = 3) -> ActorConfig:
    """As one would for so many sessions of such lengths."""
    return ActorConfig(
        num_slots=batch,
        context_tokens=max(16, longest),
        max_turn_tokens=most_new,
        decode_rows=batch,
        decode_row_sizes=num_sizes,
        decode_steps=8,
        prefill_rows=4,
        prefill_row_sizes=min(2, num_sizes),
        prefill_tokens=64,
        context_sizes=num_sizes,
    )


def make_engine(model: ModelConfig, actor: ActorConfig, params: Params, *, sampling: Kind = "temperature") -> Engine:
    return Engine(model, actor, params, 0, end_of_turn=END, sampling=sampling)


async def answer(
    engine: Engine, requests: list[Request], seed: int, *, greedy: bool = False
) -> tuple[list[list[int]], list[list[float]]]:
    """All requests' tokens and their log probabilities."""
    waiting = deque(enumerate(requests))
    active: dict[int, int] = {}
    tokens: list[list[int]] = [[] for _ in requests]
    logprobs: list[list[float]] = [[] for _ in requests]
    while waiting or active:
        while waiting and engine.num_free:
            number, request = waiting.popleft()
            slot = engine.acquire(Sampling(key=request_key(seed, number), greedy=greedy))
            engine.begin_turn(slot, request.prompt, request.num_new)
            active[slot] = number
        for turn in await engine.advance():
            number = active.pop(turn.slot)
            own = turn.slot, slice(turn.start, turn.end)
            tokens[number] = engine.transcripts.tokens[own].tolist()
            logprobs[number] = engine.transcripts.logprobs[own].tolist()
            engine.release(turn.slot)
    return tokens, logprobs


def main(folder: Path) -> None:
    enable_compilation_cache()
    work = read_work(folder)
    model = config_from_dict({"recipe": "benchmark", "model": work.settings["model"]}).model
    params = unflatten_parameters(model, work.tensors)
    longest = max(len(request.prompt) + request.num_new for request in work.requests)
    actor = actor_config(work.settings["batch"], longest, work.most_new)
    engine = make_engine(model, actor, params)

    def update() -> dict[str, Any]:
        tokens, logprobs = asyncio.run(answer(engine, work.requests, 0))
        return {"tokens": tokens, "logprobs": logprobs}

    def warm_up() -> dict[str, Any]:
        asyncio.run(answer(engine, work.batches[0], 0))
        # Of one size each: speed is no matter, compilations are.
        of_one_size = actor_config(len(work.greedy), longest, work.most_new, num_sizes=1)
        other = make_engine(model, of_one_size, params, sampling="greedy")
        return {"greedy": asyncio.run(answer(other, work.greedy, 0, greedy=True))[0]}

    serve(update, {"layout": f"{actor.num_slots} slots of {actor.context_tokens}"}, warm_up)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

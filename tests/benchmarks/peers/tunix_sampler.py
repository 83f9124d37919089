"""google-tunix's `Sampler` on the same requests: `python -m tests.benchmarks.peers.tunix_sampler FOLDER`.

Its own `Llama3` with our weights. Prompts are padded to the longest of the work, so that one prefill is compiled;
a batch generates as many tokens as its longest answer needs, and each such number is compiled in the warm-up. The
cache holds just the longest prompt and answer. (Its rollouts pass configured maxima instead, which are larger:
more cache to read.)
"""

from __future__ import annotations

import importlib.metadata
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from tunix.generate.sampler import CacheConfig, Sampler

from tests.benchmarks.peers.requests import Request, read_work, rows_computed
from tests.benchmarks.peers.tunix_model import EOS, IdsAsText, make_model
from tests.benchmarks.peers.turns import serve


def main(folder: Path) -> None:
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    work = read_work(folder)
    model = work.settings["model"]
    mesh = Mesh([[jax.devices()[0]]], ("fsdp", "tp"))
    with mesh:
        transformer = make_model(model, work.tensors)
    sampler = Sampler(
        transformer,
        IdsAsText(),
        CacheConfig(
            cache_size=work.longest_prompt + work.most_new,
            num_layers=model["num_layers"],
            num_kv_heads=model["num_kv_heads"],
            head_dim=model["head_width"],
        ),
    )

    def answer(batch: list[Request], seed: int, **sampling: Any) -> list[list[int]]:
        made = sampler(
            [" ".join(map(str, request.prompt)) for request in batch],
            max_generation_steps=max(request.num_new for request in batch),
            max_prompt_length=work.longest_prompt,
            eos_tokens=[EOS],
            seed=seed,
            **sampling,
        )
        return [tokens[: request.num_new].tolist() for tokens, request in zip(made.tokens, batch, strict=True)]

    def update() -> dict[str, Any]:
        batches = enumerate(work.batches)
        return {"tokens": [ids for seed, batch in batches for ids in answer(batch, seed, temperature=1.0, top_p=1.0)]}

    def warm_up() -> dict[str, Any]:
        update()
        return {"greedy": answer(work.greedy, 0)}

    versions = {name: importlib.metadata.version(name) for name in ("google-tunix", "jax", "flax")}
    layout = f"{len(work.batches)} static batches, cache of {work.longest_prompt + work.most_new}"
    serve(update, {"versions": versions, "layout": layout, "rows": rows_computed(work)}, warm_up)


if __name__ == "__main__":
    main(Path(sys.argv[1]))  # XLA takes its threads from the CPUs this process may use

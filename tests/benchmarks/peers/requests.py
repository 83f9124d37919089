"""The requests of a folder, as a library that works on static batches takes them. NumPy only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

GREEDY_REQUESTS, GREEDY_TOKENS = 8, 24
"""Answered greedily during the warm-up: all contestants must give the same tokens."""


class Request(NamedTuple):
    prompt: list[int]
    num_new: int


class Work(NamedTuple):
    settings: dict[str, Any]
    """`model`, and `batch`: requests at a time."""
    tensors: dict[str, np.ndarray]
    requests: list[Request]

    @property
    def batches(self) -> list[list[Request]]:
        """In the order of arrival: how long an answer gets, nobody knows before."""
        size = self.settings["batch"]
        return [self.requests[start : start + size] for start in range(0, len(self.requests), size)]

    @property
    def greedy(self) -> list[Request]:
        return [Request(request.prompt, GREEDY_TOKENS) for request in self.requests[:GREEDY_REQUESTS]]

    @property
    def longest_prompt(self) -> int:
        return max(len(request.prompt) for request in self.requests)

    @property
    def most_new(self) -> int:
        return max(request.num_new for request in self.requests)


def read_work(folder: Path) -> Work:
    arrays = dict(np.load(folder / "work.npz"))
    ends = np.cumsum(arrays["request.prompt_lengths"])[:-1]
    prompts = [part.tolist() for part in np.split(arrays["request.prompt_tokens"], ends)]
    requests = [Request(*pair) for pair in zip(prompts, arrays["request.num_new"].tolist(), strict=True)]
    tensors = {name.removeprefix("policy."): value for name, value in arrays.items() if name.startswith("policy.")}
    return Work(json.loads((folder / "work.json").read_text()), tensors, requests)


def rows_computed(work: Work) -> int:
    """Decode rows of a static batch: each of its rows goes on until the longest answer ends."""
    return sum(len(batch) * max(request.num_new for request in batch) for batch in work.batches)


def padded_left(prompts: list[list[int]], pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids int64 `[B, P]`, and where they are real, padded to the longest."""
    longest = max(map(len, prompts))
    ids = np.full((len(prompts), longest), pad, np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
    return ids, np.arange(longest) >= longest - np.array([[len(prompt)] for prompt in prompts])

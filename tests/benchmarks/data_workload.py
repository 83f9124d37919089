"""Trajectories with the entropy of real ones: word-like tokens by Zipf's law, their text, log probabilities, versions by turn.

Four in ten tokens are the policy's. Of five trajectories one saw a swap of weights. What compresses well in them compresses
well in practice: masks, versions, names; what does not, does not: log probabilities.
"""

from __future__ import annotations

import functools
import itertools
import json

import numpy as np

from tests.benchmarks.workload import agentic_lengths
from tunix_core.types import Trajectory, Turn

VOCAB_SIZE = 32_768
GROUP_SIZE = 8
ENVIRONMENTS = ("lookup", "python", "sql", "files")


@functools.cache
def _words() -> np.ndarray:
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    drawn = letters[rng.integers(0, len(letters), (VOCAB_SIZE, 7))]
    return np.array(["".join(row[: 2 + number % 6]) for number, row in enumerate(drawn)], object)


def make_trajectories(num: int, seed: int = 0) -> list[Trajectory]:
    """Whole groups where `num` is a multiple of `GROUP_SIZE`."""
    rng = np.random.default_rng(seed)
    words = _words()
    return [_trajectory(rng, words, index, int(length)) for index, length in enumerate(agentic_lengths(num, seed))]


def _trajectory(rng: np.random.Generator, words: np.ndarray, index: int, length: int) -> Trajectory:
    group, member = divmod(index, GROUP_SIZE)
    tokens = (rng.zipf(1.2, length) % VOCAB_SIZE).astype(np.int32)
    bounds = sorted({0, length, *(rng.integers(1, length, 4).tolist())})
    turns, mask = [], np.zeros(length, bool)
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        role = ("prompt", "policy", "tool")[0 if not number else 1 + (number + 1) % 2]
        mask[start:end] = role == "policy"
        tool = "search" if role == "tool" else ""
        turns.append(Turn(role=role, start=start, end=end, tool_name=tool, seconds=float(rng.exponential(0.5))))
    version = 10 + group // 64
    versions = np.full(length, version, np.int32)
    if rng.random() < 0.2:
        versions[length // 2 :] += 1
    reward = float(rng.random() < 0.4)
    messages = [{"role": turn.role, "content": " ".join(words[tokens[turn.start : turn.end]])} for turn in turns]
    return Trajectory(
        trajectory_id=f"00000000-{group:08d}-{member}-0",
        episode_id=f"00000000-{group:08d}-{member}",
        group_id=f"00000000-{group:08d}",
        group_size=GROUP_SIZE,
        task_id=str(group),
        environment=ENVIRONMENTS[group % len(ENVIRONMENTS)],
        task_seed=2 * group,
        split="train",
        actor_id="actor_0_0",
        incarnation="inc0",
        created_at=1_800_000_000.0 + index + float(rng.random()),
        tokens=tokens,
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -rng.exponential(0.7, length), 0).astype(np.float32),
        token_policy_version=np.where(mask, versions, -1).astype(np.int32),
        temperature=1.0,
        turns=turns,
        reward=reward,
        reward_components={"answer": reward, "format": float(rng.random() < 0.9)},
        finish_reason="completed",
        generation_seconds=float(rng.exponential(4.0)),
        environment_seconds=float(rng.exponential(2.0)),
        messages=json.dumps(messages),
    )

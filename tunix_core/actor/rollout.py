"""Rollouts of given tasks with given weights, start to end: for evaluation and the warm start."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tunix_core.actor.calls import Calls, abandonable_calls, run_loop
from tunix_core.actor.engine import Engine
from tunix_core.actor.episodes import EpisodeFailed, EpisodeSpec, Identity, Outcome, limits_of
from tunix_core.actor.policy_engine import Request
from tunix_core.actor.scheduler import Scheduler
from tunix_core.config import EvaluationConfig, RunConfig
from tunix_core.environments import make_environment
from tunix_core.pretrained.loading import load_tokenizer


class Rollouts(NamedTuple):
    """Outcomes in the order of the task seeds, M of them."""

    rewards: np.ndarray  # float32 [M]; 0 where the environment failed
    num_turns: np.ndarray  # int32 [M], policy messages
    num_policy_tokens: np.ndarray  # int32 [M]
    finish_reasons: list[str]
    transcripts: list[list[dict[str, str]]]
    """Messages `{"role", "content"}` per task, of a forked episode its last trajectory's; empty where the environment failed."""

    @property
    def success(self) -> np.ndarray:
        """bool [M]: the full reward."""
        return self.rewards >= 1.0


_NO_KEY = np.zeros(2, np.uint32)

GREEDY = Request(key=_NO_KEY, greedy=True)


def evaluation_request(evaluation: EvaluationConfig) -> Request:
    """How a run's evaluations sample."""
    if evaluation.greedy:
        return GREEDY
    return Request(
        key=_NO_KEY,
        temperature=evaluation.temperature,
        top_k=evaluation.top_k,
        top_p=evaluation.top_p,
        min_p=evaluation.min_p,
    )


class Evaluator:
    """A compiled engine for rollouts of many weights; making one compiles, running it does not.

    Injected latency is off: what is measured is the policy.

    Args:
        params: shaped as the weights that it will run.
        request: how its conversations are sampled; each has a key of its own.
        num_slots: at a time; by default at least 64.
    """

    def __init__(self, config: RunConfig, params: Any, *, request: Request = GREEDY, num_slots: int = 0) -> None:
        actor = dataclasses.replace(
            config.actor, num_slots=num_slots or max(64, config.actor.num_slots), swap_policy="immediate"
        )
        self._config = dataclasses.replace(config, actor=actor)
        self._tokenizer = load_tokenizer(config.model)
        self._limits = limits_of(config, self._tokenizer)
        self._engine = Engine(
            config.model,
            actor,
            params,
            0,
            end_of_turn=self._tokenizer.end_of_turn,
            decode=self._tokenizer.decode,
            sampling="greedy" if request.greedy else "any" if request.truncated else "temperature",
        )
        self._request = request

    @property
    def engine(self) -> Engine:
        return self._engine

    def run(self, params: Any, task_seeds: Sequence[int], *, version: int | None = None, name: str = "") -> Rollouts:
        """Play one episode per task seed.

        Args:
            params: weights, shaped as those the evaluator was made with.
            task_seeds: M seeds; equal ones are members of one group in order.
            version: stored with the tokens; rises by one per call when not given.
            name: distinguishes the samples of one call from those of another.
        """
        self._engine.swap(params, self._engine.version + 1 if version is None else version)
        outcomes: dict[int, Outcome] = {}
        calls = abandonable_calls(self._config)
        run_loop(self._run(list(task_seeds), name, outcomes, calls), calls)
        return _collect([outcomes[i] for i in range(len(outcomes))])

    async def _run(self, task_seeds: list[int], name: str, outcomes: dict[int, Outcome], calls: Calls) -> None:
        config = self._config
        identity = Identity(
            actor_id="evaluator",
            incarnation="0",
            environment=config.environment.name,
            temperature=self._request.temperature,
        )
        scheduler = Scheduler(
            self._engine,
            identity,
            self._limits,
            lambda seed: make_environment(config.environment, latency=False, weather_seed=seed),
            self._tokenizer,
            config.seed,
            calls,
            lambda spec, outcome: outcomes.__setitem__(int(spec.task_id), outcome),
            self._request,
        )
        members: dict[int, int] = {}
        specs = []
        for index, seed in enumerate(task_seeds):
            member = members[seed] = members.get(seed, -1) + 1
            group = f"evaluation{name}-{seed:019d}"
            size = max(2, config.algorithm.group_size)
            specs.append(
                EpisodeSpec(group_id=group, group_size=size, member=member, task_id=str(index), task_seed=seed)
            )
        waiting = specs[::-1]
        while waiting or scheduler.num_sessions:
            while waiting and scheduler.num_free:
                scheduler.start(waiting.pop())
            await scheduler.step(1.0)
        await calls.finish_closing(self._limits.step_seconds)  # the loop ends here, and would cut them off


def _collect(outcomes: list[Outcome]) -> Rollouts:
    episodes = [[] if isinstance(outcome, EpisodeFailed) else outcome for outcome in outcomes]
    last = [episode[-1] if episode else None for episode in episodes]
    return Rollouts(
        rewards=np.array([t.reward if t else 0.0 for t in last], np.float32),
        num_turns=np.array([sum(turn.role == "policy" for t in e for turn in t.turns) for e in episodes], np.int32),
        num_policy_tokens=np.array([sum(t.num_policy_tokens for t in e) for e in episodes], np.int32),
        finish_reasons=[t.finish_reason if t else "failed" for t in last],
        transcripts=[json.loads(t.messages) if t else [] for t in last],
    )

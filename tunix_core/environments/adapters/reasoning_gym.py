"""Questions of `reasoning-gym`: one instance per seed, one answer, scored by the dataset itself.

A message without an answer is told so and the episode goes on; an answer ends it with the dataset's score,
1 for a right one. Facts about the datasets of 0.1.25 that a run meets: five of them give no reference answer
(`boxnet`, `graph_color`, `propositional_logic`, `rubiks_cube`, `rush_hour`), so they have no demonstrations;
those of `HASH_DEPENDENT` iterate over sets; `game_of_life_halting` is refused, for it scores any answer as right.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import random
from collections.abc import Mapping
from typing import Any

from tunix_core.environment_config import EnvironmentConfig, ReasoningGymOptions
from tunix_core.environments.adapters.blocking import BlockingEnvironment, load_package
from tunix_core.environments.adapters.messages import extract, how_to
from tunix_core.environments.base import MAX_DRAWS, Observation, StepResult, draw_instance
from tunix_core.errors import ConfigError
from tunix_core.validation import require

HASH_DEPENDENT = {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
"""Whose instance of a seed differs between processes unless these hash text alike."""

ANY_ANSWER_IS_RIGHT = {"game_of_life_halting"}
"""It compares the truth of two texts, as Python has it."""

NO_ANSWER = "No answer found."


@dataclasses.dataclass(frozen=True)
class ReasoningInstance:
    """One question; its `repr`, which the splits go by, is the question alone."""

    dataset: Any = dataclasses.field(repr=False)
    entry: Mapping[str, Any] = dataclasses.field(repr=False)
    question: str


class ReasoningGym(BlockingEnvironment):
    """See the module.

    Raises:
        ConfigError: the package is missing, or does not know a dataset or one of its fields.
    """

    name = "reasoning_gym"

    def __init__(self, config: EnvironmentConfig, *, latency: bool = True, weather_seed: int = 0) -> None:
        super().__init__(config, latency=latency, weather_seed=weather_seed)
        self._options = config.options_as(ReasoningGymOptions)
        self._package = load_package("reasoning_gym", "reasoning-gym")
        self._instance: ReasoningInstance | None = None
        self._malformed = 0
        self.instructions = how_to(
            self._options.answer, "answer", "your final answer, in the form that the question asks for,"
        )
        for name in self._options.datasets:
            _check_dataset(self._package.factory.DATASETS, name, self._options.dataset_configs.get(name, {}))

    def instance(self, seed: int) -> ReasoningInstance:
        """The question that `seed` names; may take long.

        Raises:
            EnvironmentFailure: the datasets have no instance for the seed's split.
        """
        if self._options.splits == "seed":
            return self._draw(random.Random(seed))
        return draw_instance(
            seed,
            self._draw,
            max_draws=MAX_DRAWS,
            too_few=f"reasoning_gym: instances of {', '.join(self._options.datasets)}. Widen dataset_configs, or set "
            "splits to seed.",
        )

    def opening(self, seed: int) -> Observation:
        """See `Demonstrated`."""
        return Observation(self.instance(seed).question, self.instructions)

    def demonstration(self, seed: int) -> list[tuple[str, str]]:
        """A perfect episode as `(role, text)`; see `Demonstrated.demonstration`.

        Raises:
            ConfigError: the dataset gives no reference answer.
        """
        instance = self.instance(seed)
        answer = instance.entry["answer"]
        if not isinstance(answer, str):
            raise ConfigError(
                "environment.options.datasets",
                instance.entry["metadata"].get("source_dataset", type(instance.dataset).__name__),
                "datasets with reference answers, for demonstrations",
                "Leave it out, or run without a warm start.",
            )
        message = f"<answer>{answer}</answer>" if self._options.answer == "tags" else answer
        return [("prompt", instance.question), ("policy", message)]

    def _draw(self, rng: random.Random) -> ReasoningInstance:
        names, weights = zip(*sorted(self._options.datasets.items()), strict=True)
        (name,) = rng.choices(names, weights)
        fields = self._options.dataset_configs.get(name, {})
        dataset = self._package.create_dataset(name, seed=rng.randrange(2**31), size=1, **fields)
        entry = dataset[0]
        return ReasoningInstance(dataset, entry, str(entry["question"]))

    def _reset(self, seed: int) -> Observation:
        self._malformed = 0
        self._instance = self.instance(seed)
        return Observation(self._instance.question, self.instructions)

    def _step(self, message: str) -> StepResult:
        assert self._instance is not None
        answer = extract(message, self._options.answer, "answer")
        if answer is None:
            self._malformed += 1
            return StepResult(
                f"{NO_ANSWER} {self.instructions}", 0.0, False, components=self._components(0.0), role="user"
            )
        score = self._score(answer)
        reward = score if self._options.partial_credit else float(score >= 1.0)
        return StepResult("", reward, True, components=self._components(score))

    def _score(self, answer: str) -> float:
        """0 to 1. Some datasets raise on an answer that they cannot read: it is a wrong one, and malformed."""
        assert self._instance is not None
        try:
            return float(self._instance.dataset.score_answer(answer, self._instance.entry))
        except Exception:
            self._malformed += 1
            return 0.0

    def _components(self, score: float) -> dict[str, float]:
        return {"answer": score, "malformed_calls": float(self._malformed)}


def _check_dataset(known: Mapping[str, tuple[Any, Any]], name: str, fields: Mapping[str, Any]) -> None:
    require(
        name in known and name != "composite",
        "environment.options.datasets",
        name,
        "a dataset of reasoning-gym",
        "See reasoning_gym.factory.DATASETS; several datasets are mixed by their weights.",
    )
    require(
        name not in ANY_ANSWER_IS_RIGHT,
        "environment.options.datasets",
        name,
        "a dataset that tells right from wrong",
        "Its score is 1 for any answer: a policy would learn nothing from it. Leave it out.",
    )
    accepted = set(inspect.signature(known[name][1]).parameters) - {"seed", "size"}
    require(
        set(fields) <= accepted,
        f"environment.options.dataset_configs.{name}",
        sorted(fields),
        ", ".join(sorted(accepted)),
        "Name fields of the dataset's configuration.",
    )
    require(
        name not in HASH_DEPENDENT or os.environ.get("PYTHONHASHSEED", "random") != "random",
        "environment.options.datasets",
        name,
        "with PYTHONHASHSEED set to the same number for every process of the run",
        "Without it a task's question differs from process to process; set it, or leave the dataset out.",
    )

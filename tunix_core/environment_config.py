"""Which environment a run plays, its options, and the limits of its tools.

Each environment has a dataclass of options of its own, the table `[environment.options]`. Environments that are not
part of this package are installed: an entry point of the group `tunix_airflow.environments` names them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import typing
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal, TypeVar

from tunix_core import paths
from tunix_core.errors import ConfigError
from tunix_core.validation import require, require_choice, require_range

ENTRY_POINTS = "tunix_airflow.environments"
"""The group under which a package offers environments: name -> factory, see `environments.make_environment`."""

TASKSET_ENTRY_POINTS = "tunix_airflow.verifiers_tasksets"
"""Tasksets for the environment verifiers: name -> class."""

GYMNASIUM_ENTRY_POINTS = "tunix_airflow.gymnasium_environments"
"""Modules that register environments with Gymnasium when they are imported: any name -> module."""


class Table(dict[str, Any]):
    """Options of free form: JSON values. Never changed once made, so that configurations stay hashable."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentOptions:
    """Base of all options; by itself: an environment without any."""

    demonstrated: ClassVar[bool] = True
    """Whether the environment can play its own tasks, as the warm start needs; false refuses a warm start
    when the run is configured."""

    @property
    def scoring_seconds(self) -> float:
        """How long scoring an episode may take by these options; a step's deadline lies above it."""
        return 0.0


# ---- built-in environments ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupOptions(EnvironmentOptions):
    num_digits: int = 3
    """Of the value to find."""
    num_keys: int = 16
    """How many keys a table draws from."""

    def __post_init__(self) -> None:
        require_range("environment.options.num_digits", self.num_digits, 1, 6)
        require_range("environment.options.num_keys", self.num_keys, 3, 26)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalculatorOptions(EnvironmentOptions):
    num_digits: int = 3
    """Of each operand."""

    def __post_init__(self) -> None:
        require_range("environment.options.num_digits", self.num_digits, 1, 6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PythonOptions(EnvironmentOptions):
    """Write a function that passes unit tests."""

    min_operations: int = 1
    max_operations: int = 3
    """Steps of the computation that the function is asked for."""
    num_examples: int = 2
    """Tests that the question shows."""
    num_hidden_tests: int = 12
    run_seconds: float = 2.0
    """Wall clock of one run in the sandbox."""
    memory_bytes: int = 256 * 2**20
    """Of one run in the sandbox."""
    num_sandboxes: int = 4
    """Runs of one process at the same time; each waits as an idle process. Scoring takes two."""

    def __post_init__(self) -> None:
        require_range("environment.options.min_operations", self.min_operations, 1, 6)
        require_range("environment.options.max_operations", self.max_operations, self.min_operations, 6)
        require_range("environment.options.num_examples", self.num_examples, 0, 8)
        require_range("environment.options.num_hidden_tests", self.num_hidden_tests, 1, 64)
        require_range("environment.options.run_seconds", self.run_seconds, 0.1, 600)
        require_range("environment.options.num_sandboxes", self.num_sandboxes, 2, 200)
        require_range("environment.options.memory_bytes", self.memory_bytes, 64 * 2**20, 2**34)

    @property
    def scoring_seconds(self) -> float:
        return 2 * self.run_seconds  # a lost sandbox is asked once more


@dataclasses.dataclass(frozen=True, kw_only=True)
class SqlOptions(EnvironmentOptions):
    """Answer a question with a query over a database."""

    num_rows: int = 40
    """Of the larger table."""
    query_seconds: float = 1.0
    max_result_rows: int = 50
    """More are neither shown nor compared: such a query is refused."""

    def __post_init__(self) -> None:
        require_range("environment.options.num_rows", self.num_rows, 12, 80)
        require_range("environment.options.query_seconds", self.query_seconds, 0.01, 60)
        require_range("environment.options.max_result_rows", self.max_result_rows, 20, 10_000)

    @property
    def scoring_seconds(self) -> float:
        return 2 * self.query_seconds  # two databases


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilesOptions(EnvironmentOptions):
    """Bring a tree of files into a wanted state."""

    num_files: int = 5
    """At the start."""
    num_changes: int = 2
    """That lead from the start to the wanted tree."""
    partial_credit: float = 0.0
    """Share of the reward for the part of the changes that is done; the rest is for the whole tree."""

    def __post_init__(self) -> None:
        require_range("environment.options.num_files", self.num_files, 2, 20)
        require_range("environment.options.num_changes", self.num_changes, 1, self.num_files)
        require_range("environment.options.partial_credit", self.partial_credit, 0, 0.9)


# ---- adapters to other packages: environments/adapters ------------------------------------------

Extract = Literal["tags", "last_line", "message"]
"""What of a message counts: the text between the last pair of tags, the last line, all of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningGymOptions(EnvironmentOptions):
    """Questions of `reasoning-gym` with one answer each."""

    datasets: Table = dataclasses.field(default_factory=lambda: Table(chain_sum=1.0))
    """Dataset -> its weight in the draw."""
    dataset_configs: Table = dataclasses.field(default_factory=Table)
    """Dataset -> fields of its configuration; `seed` and `size` follow from the task."""
    answer: Extract = "tags"
    """Tags: `<answer>…</answer>`."""
    partial_credit: bool = True
    """Rewards are the dataset's scores, 0 to 1; false: only a score of 1 is a reward."""
    splits: Literal["instance", "seed"] = "instance"
    """`instance`: no question of the held-out split is ever trained on; a held-out reset then draws about 8
    questions. `seed`: one draw, for slow generators of many instances; the splits differ by seed only."""

    def __post_init__(self) -> None:
        field = "environment.options"
        require(
            bool(self.datasets) and all(isinstance(w, int | float) and w > 0 for w in self.datasets.values()),
            f"{field}.datasets",
            self.datasets,
            "at least one dataset, weights above 0",
            "Name datasets with weights, such as chain_sum = 1.0.",
        )
        require_choice(f"{field}.answer", self.answer, Extract)
        require_choice(f"{field}.splits", self.splits, Literal["instance", "seed"])
        for name, fields in self.dataset_configs.items():
            require(
                name in self.datasets and isinstance(fields, dict) and not {"seed", "size"} & set(fields),
                f"{field}.dataset_configs.{name}",
                fields,
                f"a table of fields other than seed and size, for one of {', '.join(self.datasets)}",
                "Configure only datasets that are drawn from; the task decides seed and size.",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GymnasiumOptions(EnvironmentOptions):
    """An environment with the Gymnasium API, text in and out through codecs."""

    demonstrated: ClassVar[bool] = False
    env_id: str = "FrozenLake-v1"
    """Shipped with Gymnasium, or registered by an installed package (entry points, `GYMNASIUM_ENTRY_POINTS`)."""
    arguments: Table = dataclasses.field(default_factory=Table)
    """Of `gymnasium.make`, `max_episode_steps` among them."""
    observation: Literal["auto", "text", "ansi", "json"] = "auto"
    """How an observation reads: as it is (text spaces), the environment's text rendering, its value as JSON;
    auto: the first of them that the environment has."""
    observation_names: tuple[str, ...] = ()
    """With json: names of a tuple's parts."""
    action: Literal["auto", "text", "names", "number", "json"] = "auto"
    """How an action is written: as it is (text spaces), by its name or number (discrete spaces), as JSON;
    auto: the first of them that the space has."""
    action_names: tuple[str, ...] = ()
    """Of a discrete space's actions in order; FrozenLake, Taxi, CliffWalking and Blackjack have theirs already."""
    extract: Extract = "message"
    """Where in the message the action stands. Tags: `<action>…</action>`."""
    instructions: str = ""
    """What the policy reads first; empty: how actions are written."""
    splits: Literal["seed", "opening"] = "seed"
    """`seed`: the splits differ by seed only. `opening`: they share no first observation, for environments with many."""

    def __post_init__(self) -> None:
        require(
            bool(self.env_id) and ":" not in self.env_id,
            "environment.options.env_id",
            self.env_id,
            "an id without a module",
            f"Let an installed package register it (entry points, group {GYMNASIUM_ENTRY_POINTS}).",
        )
        require(
            not self.env_id.startswith(("GymV21Environment", "GymV26Environment")),
            "environment.options.env_id",
            self.env_id,
            "no id that stands for environments of the package gym",
            "Its argument names a module that would be imported: register the environment itself, wrapped in shimmy.",
        )
        hints = typing.get_type_hints(type(self))
        for name in ("observation", "action", "extract", "splits"):
            require_choice(f"environment.options.{name}", getattr(self, name), hints[name])
        require(
            len(set(map(str.casefold, self.action_names))) == len(self.action_names),
            "environment.options.action_names",
            self.action_names,
            "names that differ, whatever their case",
            "Give each action a name of its own.",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextArenaOptions(EnvironmentOptions):
    """A single-player game of `textarena`."""

    demonstrated: ClassVar[bool] = False
    env_id: str = "GuessTheNumber-v0"
    arguments: Table = dataclasses.field(default_factory=Table)
    """Of the game, such as max_number = 10."""
    max_invalid_moves: int = 0
    """Invalid moves in a row that are only told; one more ends the game. 0: the game's own number, mostly 1."""

    def __post_init__(self) -> None:
        require_range("environment.options.max_invalid_moves", self.max_invalid_moves, 0, 1000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemOptions(EnvironmentOptions):
    """A game of `gem-llm`. Its other environments fetch data sets, or ignore the seed."""

    demonstrated: ClassVar[bool] = False
    env_id: str = "game:GuessTheNumber-v0"
    arguments: Table = dataclasses.field(default_factory=Table)
    """Of the game."""

    def __post_init__(self) -> None:
        require(
            self.env_id.startswith("game:"),
            "environment.options.env_id",
            self.env_id,
            "game:…",
            "For rg: use the environment reasoning_gym; the others fetch data sets when they start.",
        )


_LOADING_FIELDS = frozenset({"id", "fn", "judges", "system_prompt"})
"""Of configurations of verifiers, at any depth: packages, functions by import path, and a file."""


def _keys(value: Any) -> Iterator[str]:
    """Of all tables within."""
    if isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _keys(part)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifiersOptions(EnvironmentOptions):
    """A taskset of `verifiers`: our policy plays, its rewards score."""

    demonstrated: ClassVar[bool] = False
    taskset: str = ""
    """Name of an entry point of the group `TASKSET_ENTRY_POINTS`."""
    config: Table = dataclasses.field(default_factory=Table)
    """Fields of the taskset's configuration, but none by which verifiers would load other code or a file."""
    held_out_one_in: int = 8
    """Tasks whose key's checksum this number divides are held out."""
    max_scanned_tasks: int = 10_000
    """Of an infinite taskset, only so many tasks from its start are played."""

    def __post_init__(self) -> None:
        require(
            bool(self.taskset),
            "environment.options.taskset",
            self.taskset,
            f"the name of an installed taskset (entry points, group {TASKSET_ENTRY_POINTS})",
            "Name the tasks.",
        )
        for key in _keys(self.config):
            require(
                key not in _LOADING_FIELDS,
                f"environment.options.config.{key}",
                self.config,
                f"fields other than {', '.join(sorted(_LOADING_FIELDS))}",
                "They name code or files to load: write them into a taskset of your own.",
            )
        require_range("environment.options.held_out_one_in", self.held_out_one_in, 2, 1000)
        require_range("environment.options.max_scanned_tasks", self.max_scanned_tasks, 1, 10**7)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenEnvOptions(EnvironmentOptions):
    """An OpenEnv server, one session of it per episode."""

    demonstrated: ClassVar[bool] = False
    url: str = "ws://127.0.0.1:8000"
    action_field: str = "message"
    """Of the action, where the policy's message goes. Empty: the message is the action as JSON."""
    action: Table = dataclasses.field(default_factory=Table)
    """Further fields of every action."""
    observation_field: str = ""
    """Of the observation, whose text the policy reads. Empty: the whole observation as JSON."""
    reset: Table = dataclasses.field(default_factory=Table)
    """Further arguments of the server's reset, beside the seed."""
    instructions: str = ""
    """What the policy reads first."""
    connect_seconds: float = 10.0
    step_seconds: float = 30.0
    """Deadline of the server's answer; past it the episode fails."""
    connect_attempts: int = 3
    """At a reset: a server that restarts or is full is asked again, after a pause that grows from 0.2 s."""

    def __post_init__(self) -> None:
        require(
            self.url.startswith(("ws://", "wss://", "http://", "https://")),
            "environment.options.url",
            self.url,
            "ws://, wss://, http:// or https://",
            "Give the address of the server.",
        )
        require_range("environment.options.connect_seconds", self.connect_seconds, 0.01, 3600)
        require_range("environment.options.step_seconds", self.step_seconds, 0.01, 3600)
        require_range("environment.options.connect_attempts", self.connect_attempts, 1, 100)


OPTIONS: dict[str, type[EnvironmentOptions]] = {
    "lookup": LookupOptions,
    "calculator": CalculatorOptions,
    "python": PythonOptions,
    "sql": SqlOptions,
    "files": FilesOptions,
    "reasoning_gym": ReasoningGymOptions,
    "gymnasium": GymnasiumOptions,
    "textarena": TextArenaOptions,
    "gem": GemOptions,
    "verifiers": VerifiersOptions,
    "openenv": OpenEnvOptions,
}
"""Options of the environments of this package, adapters to other packages included; `environments.FACTORIES` has
the same names."""


# ---- the section --------------------------------------------------------------------------------

Options = TypeVar("Options", bound=EnvironmentOptions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """What the agent does. Latency is injected per tool call, lognormal with the given mean."""

    name: str = "lookup"
    """One of this package, or an installed one."""
    options: EnvironmentOptions | Table = dataclasses.field(default=None)  # type: ignore[assignment]
    """Of that environment; not given: its defaults. A `Table` until the factory of an installed one is at hand."""
    tool_format: Literal["plain", "hermes", "llama3"] = "plain"
    """How a message calls tools and how answers come back, see `tools.formats`."""
    num_tasks: int = 4096
    """Training tasks per epoch; the next epoch repeats them."""
    latency_mean_seconds: float = 0.15
    latency_sigma: float = 0.5
    """Sigma of the logarithm; 0 makes every call take the mean."""
    failure_probability: float = 0.0
    """Chance that a tool call raises: fault injection for tests."""
    timeout_seconds: float = 10.0
    """Deadline of one reset or step; past it the episode fails and is counted."""
    call_timeout_seconds: float = 5.0
    """Deadline of one tool call, injected latency apart; past it the call has failed and the episode goes on."""
    max_calls_per_turn: int = 8
    """Further calls of a message are not made."""
    max_output_bytes: int = 16_384
    """What a call returns beyond it is cut off, with a mark."""
    max_turns: int = 0
    """Policy messages after which the environment itself ends and scores an episode; 0: `actor.max_turns` alone
    ends it, unscored."""

    def __post_init__(self) -> None:
        paths.name("environment.name", self.name)
        if self.options is None:
            object.__setattr__(self, "options", options_type(self.name)())
        elif self.name in OPTIONS:
            require(
                type(self.options) is OPTIONS[self.name],
                "environment.options",
                self.options,
                f"{OPTIONS[self.name].__name__} with environment.name = {self.name}",
                "Give the options of that environment.",
            )
        require_choice("environment.tool_format", self.tool_format, typing.get_type_hints(type(self))["tool_format"])
        require_range("environment.num_tasks", self.num_tasks, 1, 2**31)
        require_range("environment.latency_mean_seconds", self.latency_mean_seconds, 0, 3600)
        require_range("environment.latency_sigma", self.latency_sigma, 0, 3)
        require_range("environment.failure_probability", self.failure_probability, 0, 1)
        require_range("environment.timeout_seconds", self.timeout_seconds, 0.01)
        scoring = 0.0 if isinstance(self.options, Table) else self.options.scoring_seconds
        require(
            self.timeout_seconds > scoring,
            "environment.timeout_seconds",
            self.timeout_seconds,
            f"above {scoring:g}, which scoring may take by environment.options",
            "Raise it: an answer that is slow to judge would else be a fault of the environment, and cost no reward.",
        )
        require_range("environment.call_timeout_seconds", self.call_timeout_seconds, 0.01)
        require_range("environment.max_calls_per_turn", self.max_calls_per_turn, 1, 64)
        require_range("environment.max_output_bytes", self.max_output_bytes, 16, 2**24)
        require_range("environment.max_turns", self.max_turns, 0, 1000)

    @property
    def demonstrated(self) -> bool:
        """See `EnvironmentOptions.demonstrated`; of an installed one nothing is known before it is made."""
        return isinstance(self.options, Table) or self.options.demonstrated

    def options_as(self, kind: type[Options]) -> Options:
        """The options with their type.

        Raises:
            ConfigError: they are of another environment.
        """
        require(
            isinstance(self.options, kind), "environment.options", self.options, kind.__name__, "Make it by its name."
        )
        return typing.cast(Options, self.options)

    def options_as_table(self) -> Table:
        """The options as they stand in a recipe."""
        return self.options if isinstance(self.options, Table) else Table(dataclasses.asdict(self.options))


def options_type(name: str) -> type[Any]:
    """Of a name's options in a configuration: `Table` where the name is not of this package."""
    return OPTIONS.get(name, Table)


# ---- what other packages offer ------------------------------------------------------------------


@functools.cache
def installed(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """The entry points of a group by name; looked for once per process.

    Raises:
        ConfigError: two packages offer the same name.
    """
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for entry in importlib.metadata.entry_points(group=group):
        known = found.setdefault(entry.name, entry)
        require(
            known.value == entry.value,
            f"entry points, group {group}",
            entry.name,
            f"one of that name, not {known.value} and {entry.value}",
            "Uninstall one of the packages.",
        )
    return found


def load_installed(group: str, name: str, field: str, others: Iterable[str] = ()) -> Any:
    """What the entry point refers to. A configuration names code in this way only: what an installed package
    offers, never a module.

    Args:
        field: of the configuration, which names it.
        others: accepted there too.

    Raises:
        ConfigError: nothing of that name is installed, or it cannot be imported.
    """
    entries = installed(group)
    if name not in entries:
        raise ConfigError(
            field,
            name,
            ", ".join([*others, *sorted(set(entries) - set(others))]) or "nothing, for none is installed",
            f"Name one of them, or install the package that offers it (entry points, group {group}).",
        )
    try:
        return entries[name].load()
    except Exception as error:  # whatever a package does when it is imported
        raise ConfigError(
            field,
            name,
            f"an entry point that can be imported, unlike {entries[name].value}",
            f"{type(error).__name__}: {error}.",
        ) from error


def installed_factory(name: str) -> Any:
    """Of the environment that a package offers by that name; raises as `load_installed` does."""
    return load_installed(ENTRY_POINTS, name, "environment.name", OPTIONS)

"""Tasks of `verifiers` (v1): our policy answers, the task's own rewards and metrics score the trace.

An episode is one prompt and one answer, scored as `Task.score` does without a runtime; the trace holds the
messages (tokens stay with the actor). What needs more is refused when the taskset is loaded: tool servers,
a container, hooks that take a runtime. Rewards are awaited on the event loop, in the process's main thread,
as the package itself does: its mathematical ones set alarms, which in another thread fail and score 0.
"""

from __future__ import annotations

import importlib
import inspect
import random
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tunix_core.environment_config import (
    TASKSET_ENTRY_POINTS,
    EnvironmentConfig,
    VerifiersOptions,
    load_installed,
)
from tunix_core.environments.adapters.blocking import load_package
from tunix_core.environments.base import SPLITS, Observation, StepResult, ToolWeather, split_of
from tunix_core.errors import ConfigError, EnvironmentFailure

EXTRA = "verifiers"

_loading = threading.Lock()
_loaded: dict[VerifiersOptions, Mapping[str, Sequence[Any]]] = {}


class Prompt(NamedTuple):
    """What a task opens with."""

    instructions: str
    question: str
    messages: list[Any]
    """Both, as the trace has them."""


class VerifiersTask:
    """One episode of one task.

    Raises:
        ConfigError: the package is missing, or see `load_tasks`.
    """

    name = "verifiers"

    def __init__(self, config: EnvironmentConfig, *, latency: bool = True, weather_seed: int = 0) -> None:
        self._options = config.options_as(VerifiersOptions)
        self._vf = load_package("verifiers.v1", EXTRA)
        self._tasks = load_tasks(self._options)
        self._weather = ToolWeather(config, weather_seed, latency=latency)
        self._task: Any = None

    async def reset(self, seed: int) -> Observation:
        tasks = self._tasks[split_of(seed)]
        if not tasks:
            raise EnvironmentFailure(
                f"verifiers: no task of {self._options.taskset} falls to the split {split_of(seed)}; it has too few. "
                "Lower held_out_one_in, or give it more."
            )
        task = random.Random(seed).choice(tasks).with_data()
        self._prompt = prompt_of(self._vf, task.data)
        self._trace = self._vf.Trace(
            task=self._vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=importlib.import_module("verifiers.v1.state").state_cls(type(task))(),
            agent=self._vf.AgentInfo(config=self._vf.AgentConfig()),
        )
        await self._hook(task.setup)
        self._task = task
        return Observation(self._prompt.question, self._prompt.instructions)

    async def step(self, message: str) -> StepResult:
        if self._task is None:
            raise EnvironmentFailure("verifiers: step before reset, or after the end")
        if threading.current_thread() is not threading.main_thread():
            raise EnvironmentFailure(
                "verifiers: rewards are right in the process's main thread only; run the loop there"
            )
        await self._weather.call()
        task, self._task = self._task, None
        trace = self._trace
        response = self._vf.Response(
            id=trace.id,
            created=int(time.time()),
            model="policy",
            message=self._vf.AssistantMessage(content=message),
            finish_reason="stop",
        )
        graph = importlib.import_module("verifiers.v1.graph")
        graph.prepare_turn(trace, self._prompt.messages).commit(response)
        trace.stop("agent_completed")
        await self._hook(task.finalize)
        await task.score(trace)
        trace.is_completed = trace.ok = True
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return StepResult("", float(trace.reward), True, components={**metrics, **rewards})

    async def close(self) -> None:
        """Holds nothing."""

    async def _hook(self, hook: Any) -> None:
        wanted = {"trace": self._trace, "runtime": None}
        names = inspect.signature(hook).parameters
        await hook(**{name: value for name, value in wanted.items() if name in names})


def load_tasks(options: VerifiersOptions) -> Mapping[str, Sequence[Any]]:
    """The tasks by split; read when the process's first session is made, so that what does not fit ends the actor.

    Raises:
        ConfigError: there is no such taskset, or its tasks need what an answer alone cannot give.
    """
    with _loading:
        if options not in _loaded:
            taskset = _taskset(options)
            tasks: dict[str, list[Any]] = {split: [] for split in SPLITS}
            bounded = taskset if taskset.bounded else taskset.take(options.max_scanned_tasks)
            for task in bounded:
                _check_task(options, task)
                held_out = zlib.crc32(task.key.encode()) % options.held_out_one_in == 0
                tasks["held_out" if held_out else "train"].append(task)
            _loaded[options] = tasks
        return _loaded[options]


def _taskset(options: VerifiersOptions) -> Any:
    vf = load_package("verifiers.v1", EXTRA)
    generic = importlib.import_module("verifiers.v1.utils.generic")
    field = "environment.options.taskset"
    kind = load_installed(TASKSET_ENTRY_POINTS, options.taskset, field)
    if not _is_taskset(kind, vf.Taskset):
        raise ConfigError(
            field, options.taskset, "a subclass of verifiers.v1.Taskset", "Name its class in the entry point."
        )
    config_type = generic.concrete_type(kind, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
    try:
        config = config_type(**{"id": options.taskset, **options.config})
    except ValueError as error:  # pydantic's
        raise ConfigError(
            "environment.options.config", options.config, f"fields of {config_type.__name__}", f"{error}."
        ) from error
    if kind.toolsets(config) or kind.task_type().toolsets(config.task):
        raise ConfigError(
            field, options.taskset, "a taskset without tool servers", "Its tasks need verifiers' harness."
        )
    return kind(config)


def _is_taskset(kind: Any, base: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, base)


def _check_task(options: VerifiersOptions, task: Any) -> None:
    """Refuse what an answer alone cannot play or score; a reward left out would be a wrong reward."""
    needs = [
        f"{hook.__name__} takes a runtime"
        for hook in [*task.hooks("reward"), *task.hooks("metric"), *_own_hooks(task)]
        if (runtime := inspect.signature(hook).parameters.get("runtime")) is not None
        and runtime.default is inspect.Parameter.empty
    ]
    if task.NEEDS_CONTAINER or task.data.image:
        needs.append("it runs in a container")
    if task.data.prompt is None:
        needs.append("its user speaks first")
    if needs:
        raise ConfigError(
            "environment.options.taskset",
            options.taskset,
            "tasks of a prompt and an answer, scored without a runtime",
            f"Task {task.data.idx}: {', '.join(needs)}.",
        )


def _own_hooks(task: Any) -> list[Any]:
    """`setup` and `finalize` where the task has its own; the base's do nothing."""
    base = importlib.import_module("verifiers.v1.task").Task
    return [
        getattr(task, name) for name in ("setup", "finalize") if getattr(type(task), name) is not getattr(base, name)
    ]


def prompt_of(vf: Any, data: Any) -> Prompt:
    """What the policy reads, and the same as messages.

    Raises:
        EnvironmentFailure: the prompt holds turns of an assistant; a conversation starts with the question here.
    """
    content_text = importlib.import_module("verifiers.v1.types").content_text
    given = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt)
    if data.system_prompt is not None:
        given.insert(0, vf.SystemMessage(content=data.system_prompt))
    texts: dict[str, list[str]] = {"system": [], "user": []}
    for message in given:
        if message.role not in texts:
            raise EnvironmentFailure(
                f"verifiers: a prompt with a turn of role {message.role!r}, accepted system and user"
            )
        texts[message.role].append(content_text(message.content))
    return Prompt("\n\n".join(texts["system"]), "\n\n".join(texts["user"]), given)

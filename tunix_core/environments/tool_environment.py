"""What an environment with tools is written on: turns, calls, limits, counts, and the reward at the end."""

from __future__ import annotations

import abc
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from tunix_core.environment_config import EnvironmentConfig, EnvironmentOptions
from tunix_core.environments.base import Observation, StepResult, ToolCall, ToolWeather, draw_instance
from tunix_core.environments.rubric import Episode, Rubric
from tunix_core.errors import EnvironmentFailure
from tunix_core.tools.formats import FORMATS, Call, Malformed, Result
from tunix_core.tools.functions import Tool, make_tools
from tunix_core.tools.rendering import instructions_with_tools, plain_instructions
from tunix_core.tools.toolbox import CallRecord, Outcomes, ToolLimits, run_calls

Task = TypeVar("Task")

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ToolEnvironment(abc.ABC, Generic[Task]):
    """A question, tools, an answer, a rubric. See CONTRIBUTING for a whole example.

    A kind of environment says how an instance is drawn (`draw`), what is asked (`question`), which functions may be
    called (`functions`) and what the result is worth (`rubric`). Its functions are methods: the instance is in `self.instance`,
    state of the episode is made in `begin`.
    """

    name: str
    options_type: ClassVar[type[EnvironmentOptions]] = EnvironmentOptions
    options: EnvironmentOptions
    task_instructions: str = ""
    """How to play, whatever the form of calls."""
    plain_instructions: str = ""
    """In place of the instructions that are made of these and the tools, in the plain form."""
    answer_pattern: re.Pattern[str] = re.compile(r".+", re.DOTALL)
    """A whole answer; what does not match is a malformed call."""
    runs_at_once: bool = True
    """The calls of one message; false: one after the other, in its order."""
    refusal: str = ""
    """Told for a malformed call in place of the reason."""

    def __init__(self, config: EnvironmentConfig, *, latency: bool = True, weather_seed: int = 0) -> None:
        self.options = config.options_as(self.options_type)
        self._tool_format = config.tool_format
        self._format = FORMATS[config.tool_format]
        self._limits = ToolLimits(config.max_calls_per_turn, config.max_output_bytes, config.call_timeout_seconds)
        self._max_turns = config.max_turns
        self._weather = ToolWeather(config, weather_seed, latency=latency)
        self.tools: dict[str, Tool] = make_tools(self.functions())
        self._rubric = self.rubric()
        self._task: Task | None = None
        self._messages: list[tuple[str, str]] = []
        self._calls: list[CallRecord] = []
        self._num_malformed = self._num_failed = self._num_turns = 0

    # ---- of the kind of environment -------------------------------------------------------------

    @abc.abstractmethod
    def draw(self, rng: random.Random) -> Task:
        """One instance, whose `repr` says all of it."""

    @abc.abstractmethod
    def question(self, task: Task) -> str:
        """What is asked."""

    @abc.abstractmethod
    def functions(self) -> Sequence[Callable[..., Any] | Tool]:
        """What may be called, see `tools.functions.Tool`. Sync ones run in threads."""

    @abc.abstractmethod
    def rubric(self) -> Rubric:
        """What an episode is worth."""

    async def begin(self) -> None:
        """Make the state that an episode of `self.instance` starts from."""

    async def close(self) -> None:
        """Give back what `begin` took."""

    def read_answer(self, text: str) -> str | None:
        """The answer in the text of an answering message; None: there is none."""
        tagged = _TAGGED.findall(text)
        found = tagged[-1].strip() if tagged else text
        return found if self.answer_pattern.fullmatch(found) else None

    # ---- the same for all -----------------------------------------------------------------------

    @property
    def instance(self) -> Task:
        """What is being played."""
        if self._task is None:
            raise EnvironmentFailure(f"{self.name}: step before reset")
        return self._task

    def task(self, seed: int) -> Task:
        """The instance that `seed` names."""
        return draw_instance(seed, self.draw)

    def opening(self, seed: int) -> Observation:
        """See `Demonstrated`."""
        return self._observation(self.question(self.task(seed)))

    def _observation(self, question: str) -> Observation:
        if not self._format.native:
            said = self.plain_instructions or plain_instructions(self.task_instructions, self.tools)
            return Observation(question, said)
        schemas = [tool.schema for tool in self.tools.values()]
        in_words = instructions_with_tools(self.task_instructions, schemas, self._tool_format)
        return Observation(question, self.task_instructions, schemas, in_words)

    async def reset(self, seed: int) -> Observation:
        self._task = self.task(seed)
        question = self.question(self._task)
        self._messages, self._calls = [("prompt", question)], []
        self._num_malformed = self._num_failed = self._num_turns = 0
        await self.begin()
        return self._observation(question)

    async def step(self, message: str) -> StepResult:
        _ = self.instance
        self._num_turns += 1
        self._messages.append(("policy", message))
        parsed = self._format.parse(message, self.tools)
        calls = parsed.calls
        if parsed.answer is not None:
            answer = self.read_answer(parsed.answer)
            if answer is not None:
                return await self._finished(answer, ())
            calls = (Malformed("neither a call of a tool nor an answer of the form that is asked for"),)
        outcomes = await run_calls(
            self.tools,
            calls,
            self._limits,
            before=self._weather.call,
            refusal=self.refusal,
            at_once=self.runs_at_once,
        )
        self._count(outcomes)
        made = tuple(ToolCall(record.name, record.ok) for record in outcomes.records)
        if self._max_turns and self._num_turns >= self._max_turns:
            return await self._finished(None, made)
        text = self._format.results(outcomes.results)
        self._messages.append(("tool", text))
        components = self._rubric.unscored() | self._counters()
        return StepResult(text, 0.0, False, made, components, role=self._format.reply_role)

    def _count(self, outcomes: Outcomes) -> None:
        self._calls += outcomes.records
        self._num_malformed += outcomes.num_malformed
        self._num_failed += outcomes.num_failed

    def _counters(self) -> dict[str, float]:
        return {
            "malformed_calls": float(self._num_malformed),
            "failed_calls": float(self._num_failed),
            "tool_calls": float(len(self._calls)),
        }

    async def _finished(self, answer: str | None, made: tuple[ToolCall, ...]) -> StepResult:
        episode = Episode(task=self.instance, messages=self._messages, calls=self._calls, answer=answer)
        score = await self._rubric.score(episode)
        components = score.components | self._counters()
        return StepResult("", score.reward, True, made, components, truncated=answer is None)


class Script(NamedTuple):
    """A perfect episode, whatever the form: one call a message and what comes back, then the answer."""

    calls: Sequence[tuple[Call, str]]
    answer: str


class ScriptedEnvironment(ToolEnvironment[Task]):
    """One that can play its tasks itself, see `Demonstrated`."""

    @abc.abstractmethod
    def script(self, task: Task) -> Script:
        """A perfect episode."""

    def demonstration(self, seed: int) -> list[tuple[str, str]]:
        task = self.task(seed)
        script = self.script(task)
        messages = [("prompt", self.question(task))]
        for call, text in script.calls:
            result = self._format.results([Result(call.name, text, True)])
            messages += [("policy", self._format.calls([call], self.tools)), (self._format.reply_role, result)]
        return [*messages, ("policy", self._format.answer(script.answer))]

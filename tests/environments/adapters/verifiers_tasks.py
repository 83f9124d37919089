"""Tasksets as their users write them, for `verifiers`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import verifiers.v1 as vf
from verifiers.v1.utils.score import verify_boxed_math_answer


class SumConfig(vf.TasksetConfig):
    num_tasks: int = 64
    largest: int = 50


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.75)
    async def right(self, trace: vf.Trace) -> float:
        # The package's own mathematical check: it sets an alarm, which only the main thread may.
        return verify_boxed_math_answer(trace.last_reply, self.data.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 20)

    @vf.metric
    async def prompt_messages(self, trace: vf.Trace) -> float:
        return float(len(trace.messages) - 1)

    async def finalize(self, trace: vf.Trace) -> None:
        trace.info["finalized"] = True


class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> Iterator[SumTask]:
        for i in range(self.config.num_tasks):
            left, right = i % self.config.largest, 3 * i % self.config.largest
            data = SumData(
                prompt=f"What is {left}+{right}?",
                system_prompt="Box the answer.",
                answer=str(left + right),
                name=f"sum {i}",
            )
            yield SumTask(data, self.config.task)


class EndlessSums(Sums):
    INFINITE = True

    def load(self) -> Iterator[SumTask]:
        for i in itertools.count():
            yield SumTask(SumData(prompt=f"What is {i}+1?", answer=str(i + 1)), self.config.task)


class BoxedTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def tests_pass(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        raise AssertionError(f"there is no runtime for {trace.id}: {runtime}")


class Boxed(vf.Taskset[BoxedTask, vf.TasksetConfig]):
    """Its reward wants a runtime."""

    def load(self) -> Iterator[BoxedTask]:
        yield BoxedTask(vf.TaskData(prompt="Fix the bug."), self.config.task)


class ContainerTask(SumTask):
    NEEDS_CONTAINER = True


class Contained(vf.Taskset[ContainerTask, SumConfig]):
    """Its tasks run in a container."""

    def load(self) -> Iterator[ContainerTask]:
        yield ContainerTask(SumData(prompt="What is 1+1?", answer="2"), self.config.task)


class UserFirst(vf.Taskset[SumTask, SumConfig]):
    """Its tasks have no prompt: a user speaks first."""

    def load(self) -> Iterator[SumTask]:
        yield SumTask(SumData(prompt=None, answer="2"), self.config.task)


class WithTools(Sums):
    """Its tasks share a tool server."""

    @classmethod
    def toolsets(cls, _config: SumConfig) -> list[vf.Toolset]:
        return [vf.Toolset(vf.ToolsetConfig())]


class Conversations(vf.Taskset[SumTask, SumConfig]):
    """Its prompts hold a turn of the assistant."""

    def load(self) -> Iterator[SumTask]:
        for i in range(64):
            prompt = [vf.UserMessage(content=f"{i}"), vf.AssistantMessage(content="Yes?")]
            yield SumTask(SumData(prompt=prompt, answer="1"), self.config.task)

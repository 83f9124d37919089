"""Write a function that passes unit tests.

prompt  Write a Python function wiso(numbers). It takes a list of integers, keeps those divisible by 3, and returns their sum.
        wiso([1, 3, 6]) == 9
policy  run def wiso(numbers): …
tool    exit 0 …
policy  = def wiso(numbers): …

What the policy writes runs in a sandbox; the tests that score it run in another one, with values that the first never sees.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tunix_core.environment_config import EnvironmentConfig, PythonOptions
from tunix_core.environments.rubric import Component, Episode, Rubric
from tunix_core.environments.sandboxes import CodeSandbox, Sandboxes, SharedPool
from tunix_core.environments.tool_environment import Script, ScriptedEnvironment
from tunix_core.errors import EnvironmentFailure
from tunix_core.sandbox.launch import find_bubblewrap
from tunix_core.sandbox.limits import SandboxConfig, SandboxLimits
from tunix_core.sandbox.results import SandboxResult, Verdict
from tunix_core.tools.formats import Call

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


class Operation(NamedTuple):
    """A step from one list to the next: its words and its expression, with `{k}` for a constant."""

    text: str
    expression: str
    low: int = 0
    high: int = 0


OPERATIONS = (
    Operation("keeps those divisible by {k}", "[x for x in numbers if x % {k} == 0]", 2, 5),
    Operation("keeps those greater than {k}", "[x for x in numbers if x > {k}]", -20, 20),
    Operation("leaves out every {k}", "[x for x in numbers if x != {k}]", -5, 5),
    Operation("adds {k} to each", "[x + {k} for x in numbers]", 1, 50),
    Operation("multiplies each by {k}", "[x * {k} for x in numbers]", 2, 9),
    Operation("replaces each by its absolute value", "[abs(x) for x in numbers]"),
    Operation("reverses their order", "numbers[::-1]"),
    Operation("sorts them, smallest first", "sorted(numbers)"),
    Operation("takes the first {k}", "numbers[:{k}]", 1, 4),
    Operation("drops the first {k}", "numbers[{k}:]", 1, 4),
    Operation("keeps the first of equal ones", "list(dict.fromkeys(numbers))"),
)
ENDINGS = (
    Operation("the list", "numbers"),
    Operation("their sum", "sum(numbers)"),
    Operation("how many there are", "len(numbers)"),
    Operation("the largest of them, or 0 if there are none", "max(numbers, default=0)"),
    Operation("the smallest of them, or 0 if there are none", "min(numbers, default=0)"),
)


class PythonTask(NamedTuple):
    """One instance."""

    function: str
    operations: tuple[tuple[int, int], ...]
    """Index of the operation, constant."""
    ending: int
    tests_seed: int

    @property
    def source(self) -> str:
        """The function."""
        lines = [f"def {self.function}(numbers):"]
        for index, k in self.operations:
            lines.append(f"    numbers = {OPERATIONS[index].expression.format(k=k)}")
        return "\n".join([*lines, f"    return {ENDINGS[self.ending].expression}"])

    @property
    def text(self) -> str:
        steps = [OPERATIONS[index].text.format(k=k) for index, k in self.operations]
        return (
            f"Write a Python function {self.function}(numbers). It takes a list of integers, {', then '.join(steps)}, and "
            f"returns {ENDINGS[self.ending].text}."
        )

    def cases(self, number: int) -> list[tuple[list[int], Any]]:
        """Arguments and results, the first ones those that the question shows."""
        rng = random.Random(self.tests_seed)
        scope: dict[str, Any] = {}
        exec(self.source, scope)  # our own text
        inputs = [[rng.randint(-30, 30) for _ in range(rng.randint(3, 8))] for _ in range(number)]
        return [(numbers, scope[self.function](list(numbers))) for numbers in inputs]


class PythonProgramming(ScriptedEnvironment[PythonTask]):
    """Reward 1 for a function that passes all tests, those of the question and hidden ones.

    Args:
        sandboxes: where code runs; by default in the pool that this process shares.
    """

    name = "python"
    options_type = PythonOptions
    options: PythonOptions
    task_instructions = (
        "You write Python functions, with the standard library alone. Try them out with the tool as you like; it shows "
        "what a program prints. Answer with the code of the function."
    )

    def __init__(
        self,
        config: EnvironmentConfig,
        *,
        latency: bool = True,
        weather_seed: int = 0,
        sandboxes: Sandboxes | None = None,
    ) -> None:
        super().__init__(config, latency=latency, weather_seed=weather_seed)
        if sandboxes is None:
            find_bubblewrap()  # refused here, it ends the process with its reason instead of every episode
            sandboxes = SharedPool(SandboxConfig(num_slots=self.options.num_sandboxes, limits=self._run_limits()))
        self._sandboxes = sandboxes
        self._sandbox: CodeSandbox | None = None

    def _run_limits(self) -> SandboxLimits:
        seconds = self.options.run_seconds
        return SandboxLimits(
            wall_seconds=seconds, cpu_seconds=max(1, -int(-seconds // 1)), memory_bytes=self.options.memory_bytes
        )

    def draw(self, rng: random.Random) -> PythonTask:
        number = rng.randint(self.options.min_operations, self.options.max_operations)
        chosen = rng.sample(range(len(OPERATIONS)), number)
        operations = tuple((i, rng.randint(OPERATIONS[i].low, OPERATIONS[i].high)) for i in chosen)
        function = "".join(rng.choice(letters) for letters in ("bdfgklmnprstw", "aeiou", "bdfgklmnprstw", "aeiou"))
        return PythonTask(function, operations, rng.randrange(len(ENDINGS)), rng.randrange(2**31))

    def question(self, task: PythonTask) -> str:
        shown = task.cases(self.options.num_examples)
        return "\n".join([task.text, *(f"{task.function}({numbers}) == {result}" for numbers, result in shown)])

    async def begin(self) -> None:
        if self._sandbox is None:
            self._sandbox = await self._sandboxes.acquire()

    async def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox = None
            await self._sandboxes.release()

    def functions(self) -> Sequence[Callable[..., Any]]:
        return [self.run]

    async def run(self, code: str) -> str:
        """Runs a Python program and shows what it prints.

        Args:
            code: the whole program.
        """
        return _report(await self._open_sandbox().run(code, limits=self._run_limits()))

    def read_answer(self, text: str) -> str | None:
        fenced = _FENCED.findall(text)
        return super().read_answer(fenced[-1].rstrip() if fenced else text)

    def rubric(self) -> Rubric:
        self._verdict: Verdict | None = None
        return Rubric(
            Component("tests_passed", self._tests_passed, 0.0),
            Component("solved", lambda _: self._verdict is not None and self._verdict.passed),
        )

    def script(self, task: PythonTask) -> Script:
        numbers, result = task.cases(1)[0]
        program = f"{task.source}\nprint({task.function}({numbers}))"
        return Script([(Call("run", {"code": program}), f"{result}\n")], task.source)

    async def _tests_passed(self, episode: Episode) -> float:
        """The share of tests; the verdict is kept for the next component."""
        self._verdict = None
        if episode.answer is None:
            return 0.0
        task, options = episode.task, self.options
        cases = task.cases(options.num_examples + options.num_hidden_tests)
        tests = {
            f"test_{i}": f"assert {task.function}({numbers!r}) == {result!r}"
            for i, (numbers, result) in enumerate(cases)
        }
        verdict = await self._check(episode.answer, tests)
        if "lost" in (
            verdict.submission.exit,
            verdict.checker.exit,
        ):  # perhaps the machine's fault; the second time not
            verdict = await self._check(episode.answer, tests)
        self._verdict = verdict
        return verdict.num_passed / len(tests)

    async def _check(self, answer: str, tests: dict[str, str]) -> Verdict:
        return await self._open_sandbox().check(answer, tests=tests, limits=self._run_limits())

    def _open_sandbox(self) -> CodeSandbox:
        if self._sandbox is None:
            raise EnvironmentFailure(f"{self.name}: step before reset")
        return self._sandbox


def _report(result: SandboxResult) -> str:
    """What a program printed, and how it ended where that is not well."""
    parts = [result.stdout + ("…" if result.stdout_truncated else "")]
    if result.stderr:
        parts.append(result.stderr[-2000:])
    if not result.ok:
        parts.append(f"[{result.exit}" + (f", exit code {result.exit_code}]" if result.exit_code is not None else "]"))
    return "\n".join(part for part in parts if part)

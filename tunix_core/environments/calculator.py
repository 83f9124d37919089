"""Sums of numbers too long to add in the head, through a calculator tool.

prompt  123+456
policy  calc 123+456
tool    579
policy  = 579
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

from tunix_core.environment_config import CalculatorOptions
from tunix_core.environments.rubric import Component, Rubric
from tunix_core.environments.tool_environment import Script, ScriptedEnvironment
from tunix_core.tools.formats import Call
from tunix_core.tools.schema import Pattern

_EXPRESSION = r"(\d{1,12})([+*-])(\d{1,12})"


class CalculatorTask(NamedTuple):
    """One instance."""

    left: int
    right: int


class Calculator(ScriptedEnvironment[CalculatorTask]):
    """Reward 1 for exactly the sum; any answer ends the episode."""

    name = "calculator"
    options_type = CalculatorOptions
    options: CalculatorOptions
    task_instructions = "You calculate, with the calculator. Answer with the number and nothing else."
    plain_instructions = (
        "You calculate. Write `calc ` and the expression to use the calculator. It answers with a number: "
        "then write `= ` and that number. Write nothing else."
    )
    answer_pattern = re.compile(r"-?\d+")
    refusal = "?"

    def draw(self, rng: random.Random) -> CalculatorTask:
        limit = 10**self.options.num_digits
        return CalculatorTask(rng.randrange(limit // 10, limit), rng.randrange(limit // 10, limit))

    def question(self, task: CalculatorTask) -> str:
        return f"{task.left}+{task.right}"

    def functions(self) -> Sequence[Callable[..., Any]]:
        return [self.calc]

    async def calc(self, expression: Annotated[str, Pattern(_EXPRESSION)]) -> str:
        """Calculates.

        Args:
            expression: two whole numbers with +, - or * between them, without spaces.
        """
        left, operator, right = re.fullmatch(_EXPRESSION, expression).groups()  # type: ignore[union-attr]  # by its pattern
        return str(_calculate(int(left), operator, int(right)))

    def rubric(self) -> Rubric:
        return Rubric(Component("answer", lambda episode: episode.answer == _solution(episode.task)))

    def script(self, task: CalculatorTask) -> Script:
        solution = _solution(task)
        return Script([(Call("calc", {"expression": self.question(task)}), solution)], solution)


def _solution(task: CalculatorTask) -> str:
    return str(task.left + task.right)


def _calculate(left: int, operator: str, right: int) -> int:
    if operator == "+":
        return left + right
    return left - right if operator == "-" else left * right

"""Sums of numbers too long to add in the head, through a calculator tool.

prompt  123+456
policy  calc 123+456
tool    579
policy  = 579
"""

from __future__ import annotations

import random
import re
from typing import NamedTuple

from tunix_core.environments.single_tool import SingleTool


class CalculatorTask(NamedTuple):
    """One instance."""

    left: int
    right: int


class Calculator(SingleTool[CalculatorTask]):
    """Answers are `= <sum>`."""

    name = "calculator"
    tool_name = "calc"
    call = re.compile(r"calc (\d{1,12})([+*-])(\d{1,12})")
    answer = re.compile(r"= (-?\d+)")
    instructions = (
        "You calculate. Write `calc ` and the expression to use the calculator. It answers with a number: "
        "then write `= ` and that number. Write nothing else."
    )

    def _draw(self, rng: random.Random) -> CalculatorTask:
        limit = 10**self._options.num_digits
        return CalculatorTask(rng.randrange(limit // 10, limit), rng.randrange(limit // 10, limit))

    def _question(self, task: CalculatorTask) -> str:
        return f"{task.left}+{task.right}"

    def _solution(self, task: CalculatorTask) -> str:
        return str(task.left + task.right)

    def _use_tool(self, task: CalculatorTask, call: re.Match[str]) -> str:
        del task  # it calculates whatever it is asked
        return str(_calculate(int(call[1]), call[2], int(call[3])))

    def demonstration(self, seed: int) -> list[tuple[str, str]]:
        task = self.task(seed)
        question, solution = self._question(task), self._solution(task)
        return [("prompt", question), ("policy", f"calc {question}"), ("tool", solution), ("policy", f"= {solution}")]


def _calculate(left: int, operator: str, right: int) -> int:
    if operator == "+":
        return left + right
    return left - right if operator == "-" else left * right

"""Two-hop lookup: a key leads to a key, that one to a value; only the tool knows which.

prompt  find c
policy  get c
tool    h
policy  get h
tool    483
policy  = 483
"""

from __future__ import annotations

import random
import re
import string
from typing import NamedTuple

from tunix_core.environments.single_tool import SingleTool


class LookupTask(NamedTuple):
    """One instance."""

    first_key: str
    second_key: str
    value: str


class Lookup(SingleTool[LookupTask]):
    """Answers are `= <value>`."""

    name = "lookup"
    tool_name = "get"
    call = re.compile(r"get ([a-z])")
    answer = re.compile(r"= (\d+)")
    instructions = (
        "You find values behind keys. Write `get k` to look up the key k. The tool answers with another key, "
        "which you look up in turn, or with a number: then write `= ` and that number. Write nothing else."
    )

    def _draw(self, rng: random.Random) -> LookupTask:
        first, second = rng.sample(string.ascii_lowercase[: self._options.num_keys], 2)
        digits = self._options.num_digits
        return LookupTask(first, second, f"{rng.randrange(10**digits):0{digits}d}")

    def _question(self, task: LookupTask) -> str:
        return f"find {task.first_key}"

    def _solution(self, task: LookupTask) -> str:
        return task.value

    def _use_tool(self, task: LookupTask, call: re.Match[str]) -> str | None:
        return {task.first_key: task.second_key, task.second_key: task.value}.get(call[1])

    def demonstration(self, seed: int) -> list[tuple[str, str]]:
        task = self.task(seed)
        return [
            ("prompt", self._question(task)),
            ("policy", f"get {task.first_key}"),
            ("tool", task.second_key),
            ("policy", f"get {task.second_key}"),
            ("tool", task.value),
            ("policy", f"= {task.value}"),
        ]

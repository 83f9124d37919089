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
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

from tunix_core.environment_config import LookupOptions
from tunix_core.environments.rubric import Component, Rubric
from tunix_core.environments.tool_environment import Script, ScriptedEnvironment
from tunix_core.tools.formats import Call
from tunix_core.tools.functions import ToolError
from tunix_core.tools.schema import Pattern

NOT_UNDERSTOOD = "?"


class LookupTask(NamedTuple):
    """One instance."""

    first_key: str
    second_key: str
    value: str


class Lookup(ScriptedEnvironment[LookupTask]):
    """Reward 1 for exactly the value; any answer ends the episode."""

    name = "lookup"
    options_type = LookupOptions
    options: LookupOptions
    task_instructions = (
        "You find values behind keys. Look up the key that you are given: it leads to another key, which you look up in "
        "turn, or to a number. Answer with that number and nothing else."
    )
    plain_instructions = (
        "You find values behind keys. Write `get k` to look up the key k. The tool answers with another key, "
        "which you look up in turn, or with a number: then write `= ` and that number. Write nothing else."
    )
    answer_pattern = re.compile(r"\d+")
    refusal = NOT_UNDERSTOOD

    def draw(self, rng: random.Random) -> LookupTask:
        first, second = rng.sample(string.ascii_lowercase[: self.options.num_keys], 2)
        digits = self.options.num_digits
        return LookupTask(first, second, f"{rng.randrange(10**digits):0{digits}d}")

    def question(self, task: LookupTask) -> str:
        return f"find {task.first_key}"

    def functions(self) -> Sequence[Callable[..., Any]]:
        return [self.get]

    async def get(self, key: Annotated[str, Pattern("[a-z]")]) -> str:
        """Looks up a key.

        Args:
            key: one letter.
        """
        task = self.instance
        found = {task.first_key: task.second_key, task.second_key: task.value}.get(key)
        if found is None:
            raise ToolError(NOT_UNDERSTOOD)
        return found

    def rubric(self) -> Rubric:
        return Rubric(Component("answer", lambda episode: episode.answer == episode.task.value))

    def script(self, task: LookupTask) -> Script:
        first, second = Call("get", {"key": task.first_key}), Call("get", {"key": task.second_key})
        return Script([(first, task.second_key), (second, task.value)], task.value)

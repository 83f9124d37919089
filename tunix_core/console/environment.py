"""An environment shown: its opening, its tools and a demonstration that is played, with what each message earns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from tunix_core.config_loading import load_recipe
from tunix_core.environments import Environment, StepResult, make_environment, split_of
from tunix_core.errors import EnvironmentFailure
from tunix_core.threads import AbandonableThreads, AbandonedCalls

MAX_THREADS = 64


def show_environment(
    console: Console, name: str, seed: int, overrides: Mapping[str, Any], messages: Sequence[str] = ()
) -> None:
    """Play one episode and print it, without injected latency.

    Args:
        overrides: options of a run, as `load_recipe` takes them.
        messages: what the policy says; by default the environment's demonstration.

    Raises:
        ConfigError: nothing of that name is installed, or an option is not accepted.
        EnvironmentFailure: the environment broke, or does not do what its own demonstration says.
    """
    # The lookup recipe's own environment options would not fit another name.
    chosen = {"environment.options": {}, "warm_start.num_steps": 0, **overrides, "environment.name": name}
    config = load_recipe("lookup", chosen).environment
    environment = make_environment(config, latency=False)
    script: list[tuple[str, str]] = []
    if not messages and hasattr(environment, "demonstration"):
        script = environment.demonstration(seed)
        messages = [text for role, text in script if role == "policy"]
    console.print(f"{environment.name}, seed {seed} ({split_of(seed)}), calls in the form {config.tool_format}")
    asyncio.run(_play(console, environment, seed, messages, [text for role, text in script if role != "policy"]))
    if not messages:
        console.print("no demonstration: say what the policy says with --say, once for each message")


async def _play(
    console: Console, environment: Environment, seed: int, messages: Sequence[str], expected: Sequence[str]
) -> None:
    # A tool that hangs in its thread would keep the command from ending.
    asyncio.get_running_loop().set_default_executor(AbandonableThreads(MAX_THREADS, AbandonedCalls()))
    try:
        first = await environment.reset(seed)
        _print(console, "instructions", first.instructions)
        for tool in first.tools:
            _print(console, "tool", json.dumps(tool, ensure_ascii=False))
        _print(console, "prompt", first.text)
        said, total, result = [first.text], 0.0, None
        for message in messages:
            if result is not None and result.done:
                raise EnvironmentFailure(f"the episode was over before the message {message!r}")
            result = await environment.step(message)
            total += result.reward
            said += [] if result.done else [result.text]
            _print(console, "policy", message)
            _print_result(console, result)
        if expected and said != list(expected):
            raise EnvironmentFailure(f"the demonstration has {list(expected)}, played it is {said}")
        console.print(f"reward {total:g}" + ("" if result and result.done else ", the episode is not over"))
    finally:
        await environment.close()


def _print_result(console: Console, result: StepResult) -> None:
    if not result.done:
        _print(console, result.role, result.text)
    calls = ", ".join(f"{call.name} {'ok' if call.ok else 'failed'}" for call in result.tool_calls)
    components = json.dumps(dict(result.components))
    console.print(f"  reward {result.reward:g}  {calls}  {components}", style="dim", soft_wrap=True)


def _print(console: Console, role: str, text: str) -> None:
    line = Text(f"{role:13}", style="dim")
    line.append(text, style="bold cyan" if role == "policy" else "")
    console.print(line, soft_wrap=True)

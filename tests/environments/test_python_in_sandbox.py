"""The `python` environment in its real sandbox: perfect episodes, and answers that would forge a verdict."""

import asyncio
import warnings

import pytest

from tests.environments.support import config
from tunix_core.environment_config import PythonOptions
from tunix_core.environments import make_environment, sandboxes, task_seed
from tunix_core.environments.base import StepResult

OPTIONS = PythonOptions(num_sandboxes=2, run_seconds=4.0)
SEED = task_seed("train", 0, 0)

FORGERIES = {
    "leaves with 0": "import os\nos._exit(0)",
    "leaves when asked": "def {f}(numbers):\n    raise SystemExit(0)",
    "equal to all": "class A:\n    def __eq__(self, other): return True\ndef {f}(numbers): return A()",
    "a number equal to all": "class A(int):\n    def __eq__(self, other): return True\ndef {f}(numbers): return A(7)",
    "no assertions": "import builtins\nbuiltins.AssertionError = KeyboardInterrupt\ndef {f}(numbers): return None",
    "prints a verdict": "print('{{\"tests\": {{\"test_0\": true}}}}')\ndef {f}(numbers): return None",
    "writes a verdict": "import os\nfor fd in range(3, 99):\n    try: os.write(fd, b'passed')\n    except OSError: pass\ndef {f}(numbers): return None",
    "looks around": "import gc\ndef {f}(numbers):\n    found = [o for o in gc.get_objects() if isinstance(o, str) and 'assert {f}' in o]\n    return eval(found[0].split('==')[1])",
    "looks up": "import sys\ndef {f}(numbers):\n    frame = sys._getframe()\n    while frame.f_back: frame = frame.f_back\n    return frame.f_globals.get('expected')",
    "no Python": "def (",
}  # fmt: skip


def play(messages: list[str]) -> list[StepResult]:
    """Each message ends an episode of its own, or is a call; all in one pool."""

    async def go() -> list[StepResult]:
        keeper = make_environment(config("python", options=OPTIONS))
        await keeper.reset(SEED)  # holds the pool open
        results = []
        for message in messages:
            environment = make_environment(config("python", options=OPTIONS))
            await environment.reset(SEED)
            try:
                results.append(await environment.step(message))
            finally:
                await environment.close()
        await keeper.close()
        assert not sandboxes._shared
        return results

    return asyncio.run(go())


def test_no_answer_forges_its_verdict_and_a_right_one_counts() -> None:
    task = make_environment(config("python", options=OPTIONS)).task(SEED)  # type: ignore[attr-defined]
    answers = [forgery.format(f=task.function) for forgery in FORGERIES.values()]
    results = play([f"= {answer}" for answer in [*answers, task.source]])
    rewards = dict(zip([*FORGERIES, "right"], [result.reward for result in results], strict=True))
    assert rewards == dict.fromkeys(FORGERIES, 0.0) | {"right": 1.0}
    assert all(result.components["tests_passed"] < 0.5 for result in results[:-1])


def test_calls_run_where_nothing_can_be_reached() -> None:
    texts = [
        r.text for r in play(["run print(1)", "run import socket\nsocket.socket()", "run while True: print('x' * 999)"])
    ]
    assert texts[0] == "1\n"
    assert "PermissionError" in texts[1]
    assert texts[1].endswith("[error, exit code 1]")
    assert len(texts[2]) < 20_000


def test_demonstrations_earn_the_reward() -> None:
    async def go() -> list[float]:
        async def episode(index: int) -> float:
            environment = make_environment(config("python", options=OPTIONS, tool_format="hermes"))
            seed = task_seed("train", index, 0)
            await environment.reset(seed)
            script = environment.demonstration(seed)  # type: ignore[attr-defined]
            results = [await environment.step(text) for role, text in script if role == "policy"]
            await environment.close()
            assert results[0].text == script[2][1]
            return results[-1].reward

        return await asyncio.gather(*(episode(index) for index in range(6)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asyncio.run(go()) == [1.0] * 6


@pytest.mark.parametrize("answer", ["= x", "run print(1)"])
def test_an_episode_that_is_called_off_gives_its_sandbox_back(answer: str) -> None:
    async def go() -> None:
        environment = make_environment(config("python", options=OPTIONS))
        await environment.reset(SEED)
        step = asyncio.ensure_future(environment.step(answer))
        await asyncio.sleep(0)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        await environment.close()

    asyncio.run(go())
    assert not sandboxes._shared

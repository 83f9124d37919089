import asyncio

import pytest

from tests.environments.support import InProcess, ScriptedSandboxes, config, play
from tunix_core.environment_config import PythonOptions
from tunix_core.environments import sandboxes, task_seed
from tunix_core.environments.python import OPERATIONS, PythonProgramming
from tunix_core.environments.sandboxes import SharedPool
from tunix_core.sandbox.limits import SandboxConfig

SEED = task_seed("train", 0, 0)


def environment(sandbox: InProcess | None = None, form: str = "plain", **options: int) -> PythonProgramming:
    made = config("python", tool_format=form, options=PythonOptions(**options))
    return PythonProgramming(made, sandboxes=ScriptedSandboxes(sandbox))


def test_hidden_tests_decide_and_are_not_in_the_question() -> None:
    sandbox = InProcess()
    played = environment(sandbox, num_examples=2, num_hidden_tests=10)
    task = played.task(SEED)
    cases = task.cases(12)
    shown = {repr(numbers): result for numbers, result in cases[:2]}
    by_heart = f"def {task.function}(numbers):\n    return {shown!r}.get(repr(numbers))"
    first, (result,) = play(played, SEED, [f"= {by_heart}"])
    assert (result.done, result.reward, result.components["solved"]) == (True, 0.0, 0.0)
    assert 2 / 12 <= result.components["tests_passed"] < 1
    (tests,) = sandbox.tests
    assert len(tests) == 12
    for (numbers, _), test in zip(cases, tests.values(), strict=True):
        assert repr(numbers) in test
    assert sum(repr(numbers) in first.text for numbers, _ in cases) == 2
    _, (result,) = play(played, SEED, [f"= {task.source}"])
    assert (result.reward, result.components["tests_passed"]) == (1.0, 1.0)


def test_every_operation_is_a_function_of_its_words() -> None:
    """Each one's own result on a list, by hand."""
    wanted = {
        "keeps those divisible by {k}": [4, -2, 4],
        "keeps those greater than {k}": [4, 7, 4],
        "leaves out every {k}": [4, -2 - 1, 7, 4],
        "adds {k} to each": [6, 0, -1, 9, 6],
        "multiplies each by {k}": [8, -4, -6, 14, 8],
        "replaces each by its absolute value": [4, 2, 3, 7, 4],
        "reverses their order": [4, 7, -3, -2, 4],
        "sorts them, smallest first": [-3, -2, 4, 4, 7],
        "takes the first {k}": [4, -2],
        "drops the first {k}": [-3, 7, 4],
        "keeps the first of equal ones": [4, -2, -3, 7],
    }
    assert [operation.text for operation in OPERATIONS] == list(wanted)
    for operation in OPERATIONS:
        k = -2 if "leaves out" in operation.text else 2
        found = eval(operation.expression.format(k=k), {"numbers": [4, -2, -3, 7, 4]})
        assert found == wanted[operation.text], operation.text


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("plain", "= ```python\n{source}\n```"),
        ("hermes", "Here it is:\n```python\n{source}\n```\nDone."),
        ("llama3", "<think>Hm.</think><answer>{source}</answer>"),
    ],
)
def test_code_is_found_in_an_answer(form: str, message: str) -> None:
    played = environment(form=form)
    _, (result,) = play(played, SEED, [message.format(source=played.task(SEED).source)])
    assert result.reward == 1.0


def test_a_program_that_fails_is_shown() -> None:
    _, results = play(environment(), SEED, ["run print('a')\nraise ValueError('b')", "run print('c')"])
    assert results[0].text == "a\n\nValueError: b\n[error, exit code 1]"
    assert results[1].text == "c\n"
    assert results[1].components["failed_calls"] == 0  # the tool did what it should


def test_a_lost_sandbox_is_asked_once_more() -> None:
    source = environment().task(SEED).source
    rewards = [play(environment(InProcess(losses)), SEED, [f"= {source}"])[1][0].reward for losses in (0, 1, 2)]
    assert rewards == [1.0, 1.0, 0.0]


def test_the_sandbox_is_given_back_once() -> None:
    shared = ScriptedSandboxes()
    played = PythonProgramming(config("python"), sandboxes=shared)

    async def go() -> None:
        await played.reset(SEED)
        assert shared.num_held == 1
        await played.close()
        await played.close()

    asyncio.run(go())
    assert shared.num_held == 0


# ---- the shared pool ----------------------------------------------------------------------------


class ScriptedPool:
    """Starts when told to, or fails."""

    made: list["ScriptedPool"] = []  # noqa: RUF012  # of one test

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.may_start = asyncio.Event()
        self.error: Exception | None = None
        self.closed = False
        self.made.append(self)

    async def start(self) -> None:
        await self.may_start.wait()
        if self.error:
            raise self.error

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedPool, "made", [])
    monkeypatch.setattr(sandboxes, "SandboxPool", ScriptedPool)


CONFIG = SandboxConfig(num_slots=2)


@pytest.mark.usefixtures("_scripted")
def test_users_share_a_pool_and_the_last_one_closes_it() -> None:
    async def go() -> None:
        users = [SharedPool(CONFIG) for _ in range(3)]
        waiting = [asyncio.ensure_future(user.acquire()) for user in users]
        await asyncio.sleep(0.01)
        (pool,) = ScriptedPool.made
        waiting[0].cancel()  # called off while it starts: the others go on
        await asyncio.sleep(0.01)
        pool.may_start.set()
        assert [await waiting[1], await waiting[2]] == [pool, pool]
        assert waiting[0].cancelled()
        await users[1].release()
        assert not pool.closed
        await users[2].release()
        assert pool.closed
        again = asyncio.ensure_future(users[0].acquire())
        await asyncio.sleep(0.01)
        ScriptedPool.made[1].may_start.set()
        assert await again is ScriptedPool.made[1]
        await users[0].release()

    asyncio.run(go())
    assert not sandboxes._shared


@pytest.mark.usefixtures("_scripted")
def test_a_pool_that_does_not_start_is_everyones_error_and_the_next_one_is_new() -> None:
    async def go() -> None:
        users = [SharedPool(CONFIG) for _ in range(2)]
        waiting = [asyncio.ensure_future(user.acquire()) for user in users]
        await asyncio.sleep(0.01)
        (pool,) = ScriptedPool.made
        pool.error = OSError("no")
        pool.may_start.set()
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert [str(error) for error in errors] == ["no", "no"]
        assert pool.closed
        assert not sandboxes._shared

    asyncio.run(go())

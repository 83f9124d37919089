import asyncio
import random
import threading

import numpy as np
import pytest

from tunix_core.actor.calls import Calls
from tunix_core.actor.episodes import EpisodeFailed
from tunix_core.environment_config import EnvironmentConfig
from tunix_core.environments.adapters.blocking import BlockingEnvironment, GlobalRandomness
from tunix_core.environments.base import Observation, StepResult
from tunix_core.errors import EnvironmentFailure
from tunix_core.threads import AbandonableThreads, AbandonedCalls


class Scripted(BlockingEnvironment):
    """Does in a step what its message says, on whatever thread it is called."""

    name = "scripted"

    def __init__(self) -> None:
        super().__init__(EnvironmentConfig(latency_mean_seconds=0.0), latency=True, weather_seed=0)
        self.gate = threading.Event()
        self.threads: list[int] = []
        self.done: list[str] = []

    def _reset(self, seed: int) -> Observation:
        self.threads.append(threading.get_ident())
        return Observation(f"{seed}")

    def _step(self, message: str) -> StepResult:
        self.threads.append(threading.get_ident())
        if message == "wait":
            self.gate.wait()
        if message == "stop iteration":
            raise StopIteration
        if message == "exit":
            raise SystemExit(3)
        if message == "divide":
            raise ZeroDivisionError
        self.done.append(message)
        return StepResult("said " + message, 0.0, message == "end")

    def _release(self) -> None:
        self.done.append("released")
        if "bad release" in self.done:
            raise OSError("scripted")


def test_calls_run_beside_the_loop_and_a_close_is_the_end() -> None:
    async def go() -> Scripted:
        environment = Scripted()
        await environment.reset(1)
        await environment.step("a")
        await environment.close()
        await environment.close()
        with pytest.raises(EnvironmentFailure, match="closed"):
            await environment.reset(2)
        unused = Scripted()
        await unused.close()
        assert unused.done == [], "nothing to release"
        return environment

    environment = asyncio.run(go())
    assert threading.get_ident() not in environment.threads
    assert environment.done == ["a", "released"]


@pytest.mark.parametrize(
    ("message", "error"),
    [("stop iteration", RuntimeError), ("exit", RuntimeError), ("divide", ZeroDivisionError)],
)
def test_what_a_call_raises_arrives_and_the_session_can_be_closed(message: str, error: type[Exception]) -> None:
    async def go() -> Scripted:
        environment = Scripted()
        await environment.reset(1)
        with pytest.raises(error):
            await environment.step(message)
        await environment.close()
        return environment

    assert asyncio.run(go()).done == ["released"]


def test_a_hung_call_costs_its_session_alone() -> None:
    calls = Calls(max_threads=4)

    async def go() -> Scripted:
        asyncio.get_running_loop().set_default_executor(calls.threads)
        hung, other = Scripted(), Scripted()
        await hung.reset(1)
        await other.reset(1)
        with pytest.raises(EpisodeFailed, match="environment_timeout"):
            await calls.run(lambda: hung.step("wait"), 0.05)
        assert calls.abandoned.num_now == 1, "the actor knows"
        with pytest.raises(EnvironmentFailure, match="abandoned"):
            await hung.step("b")
        assert (await other.step("b")).text == "said b"
        for environment in (hung, other):
            calls.close(environment, 5.0)
        await calls.finish_closing(2.0)
        assert (hung.done, other.done) == ([], ["b", "released"])
        assert calls.num_failed_closes == 0
        hung.gate.set()
        while calls.abandoned.num_now:
            await asyncio.sleep(0.001)
        return hung

    assert asyncio.run(go()).done == ["wait", "released"], "what it held is released when the call returns"


def test_a_call_that_was_given_up_before_it_had_a_thread_never_begins() -> None:
    async def go() -> Scripted:
        asyncio.get_running_loop().set_default_executor(AbandonableThreads(1, AbandonedCalls()))
        first, second = Scripted(), Scripted()
        await first.reset(1)
        waiting = asyncio.create_task(first.step("wait"))
        await asyncio.sleep(0.02)
        late = asyncio.create_task(second.reset(1))
        await asyncio.sleep(0.02)
        late.cancel()
        await asyncio.wait({late})
        first.gate.set()
        await waiting
        with pytest.raises(EnvironmentFailure, match="abandoned"):
            await second.reset(1)
        await first.close()
        await second.close()
        return second

    second = asyncio.run(go())
    assert second.threads == []
    assert second.done == []


def test_steps_after_the_end_are_refused() -> None:
    async def go() -> None:
        environment = Scripted()
        await environment.reset(1)
        assert (await environment.step("end")).done
        with pytest.raises(EnvironmentFailure, match="after the end"):
            await environment.step("a")
        await environment.close()

    asyncio.run(go())


def test_sessions_draw_from_the_process_generators_as_if_alone() -> None:
    """Interleaved draws of two sessions equal each session's own, and the process's go on as before."""
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    expected_outside = [random.random(), np.random.rand()]  # noqa: NPY002
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002

    def draw(session: GlobalRandomness) -> tuple[float, float]:
        with session.installed():
            return random.random(), np.random.rand()  # noqa: NPY002

    alone = [[draw(session) for _ in range(3)] for session in (GlobalRandomness(1), GlobalRandomness(2**63 - 1))]
    one, two = GlobalRandomness(1), GlobalRandomness(2**63 - 1)
    mixed = [(draw(one), draw(two)) for _ in range(3)]
    assert [[a for a, _ in mixed], [b for _, b in mixed]] == alone
    assert alone[0] != alone[1]
    assert [random.random(), np.random.rand()] == expected_outside  # noqa: NPY002

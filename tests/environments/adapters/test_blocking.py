import asyncio
import random
import threading
import time

import numpy as np
import pytest

from tunix_core.environment_config import EnvironmentConfig
from tunix_core.environments.adapters import blocking
from tunix_core.environments.adapters.blocking import BlockingEnvironment, GlobalRandomness, SessionThread
from tunix_core.environments.base import Observation, StepResult
from tunix_core.errors import EnvironmentFailure


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


def test_a_sessions_calls_share_one_thread_that_close_ends() -> None:
    async def go() -> Scripted:
        environment = Scripted()
        await environment.reset(1)
        await environment.step("a")
        await environment.close()
        await environment.close()
        with pytest.raises(EnvironmentFailure, match="closed"):
            await environment.reset(2)
        return environment

    environment = asyncio.run(go())
    assert len(set(environment.threads)) == 1
    assert environment.threads[0] != threading.get_ident()
    assert environment.done == ["a", "released"]
    assert environment._thread._thread is not None
    environment._thread._thread.join(5)
    assert not environment._thread._thread.is_alive()


@pytest.mark.parametrize(
    ("message", "error"),
    [("stop iteration", EnvironmentFailure), ("exit", EnvironmentFailure), ("divide", ZeroDivisionError)],
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
    async def go() -> tuple[Scripted, float]:
        hung, other = Scripted(), Scripted()
        await hung.reset(1)
        await other.reset(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await hung.step("wait")
        with pytest.raises(EnvironmentFailure, match="abandoned"):
            await hung.step("b")
        assert (await other.step("b")).text == "said b"
        started = time.monotonic()
        await hung.close()
        await other.close()
        return hung, time.monotonic() - started

    hung, seconds = asyncio.run(go())
    assert seconds < 2
    assert hung.done == []
    hung.gate.set()
    assert hung._thread._thread is not None
    hung._thread._thread.join(5)
    assert hung.done == ["wait", "released"], "what it held is released when the call returns"


def test_a_release_that_hangs_or_raises_does_not_hold_the_actor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blocking, "CLOSE_SECONDS", 0.05)
    gate = threading.Event()

    async def go() -> None:
        environment = Scripted()
        await environment.reset(1)
        await environment.step("bad release")
        await environment.close()
        thread = SessionThread("hanging")
        await thread.call(int)
        await thread.close(gate.wait)

    asyncio.run(go())
    gate.set()
    assert "scripted" in caplog.text


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

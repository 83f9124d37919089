import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tunix_core.actor.openai_client import Gate, Unreachable, pause_seconds
from tunix_core.engine_config import EngineConfig


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_places_are_given_in_order_of_arrival_and_never_above_the_limit() -> None:
    async def test() -> None:
        gate, order = Gate(2), []

        async def request(number: int) -> None:
            await gate.enter()
            order.append(number)
            assert gate.active <= 2

        tasks = [asyncio.create_task(request(i)) for i in range(5)]
        await settle()
        assert order == [], "a gate is closed until its server is up"
        gate.open()
        for served in range(5):
            await settle()
            assert order == list(range(min(5, served + 2)))
            gate.leave()
        await asyncio.gather(*tasks)

    run(test)


def test_an_overload_halves_the_limit_once_and_rounds_win_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "HOLD_SECONDS", 0.05)

    async def test() -> None:
        gate = Gate(64)
        for _ in range(30):
            gate.overloaded()  # all of one burst
        assert gate.limit == 32
        gate.served()
        assert gate.limit == 32, "nothing is won back while the overload lasts"
        await asyncio.sleep(0.06)
        gate.overloaded()
        assert gate.limit == 16
        await asyncio.sleep(0.06)
        for _ in range(17):
            gate.served()
        assert 16.9 < gate.limit < 17.1, "a round of served requests lets one more in"
        for _ in range(5000):
            gate.served()
        assert gate.limit == 64

    run(test)


def test_a_place_given_to_one_that_gave_up_goes_to_the_next() -> None:
    async def test() -> None:
        gate = Gate(1)
        gate.open()
        await gate.enter()
        first, second = asyncio.create_task(gate.enter()), asyncio.create_task(gate.enter())
        await settle()
        gate.leave()  # the place is the first one's, which has not run yet
        first.cancel()
        await settle()
        assert second.done()
        assert gate.active == 1

    run(test)


def test_those_that_wait_are_sent_away_when_the_server_goes() -> None:
    async def test() -> None:
        gate = Gate(1)
        waiting = asyncio.create_task(gate.enter())
        await settle()
        gate.turn_away(Unreachable("engine_connection", "gone"))
        with pytest.raises(Unreachable):
            await waiting
        assert gate.active == 0

    run(test)


def test_drained_waits_for_the_last_one() -> None:
    async def test() -> None:
        gate = Gate(2)
        gate.open()
        await gate.enter()
        gate.close()
        late, drained = asyncio.create_task(gate.enter()), asyncio.create_task(gate.drained())
        await settle()
        assert not drained.done()
        gate.leave()
        await drained
        assert not late.done(), "a closed gate lets nobody in"
        gate.open()
        await late

    run(test)


def test_pauses_double_at_random_up_to_the_longest() -> None:
    config = EngineConfig(first_retry_seconds=0.5, last_retry_seconds=4.0)
    for failures, whole in ((1, 0.5), (2, 1.0), (4, 4.0), (90, 4.0)):
        drawn = {pause_seconds(config, failures) for _ in range(50)}
        assert whole / 2 <= min(drawn) < max(drawn) <= whole

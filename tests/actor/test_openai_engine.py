"""What servers do wrong, and what it costs; against the policy server's faults."""

import asyncio
import dataclasses
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.actor.support import ACTOR, MODEL, expected_logprobs, weights
from tests.support.server_process import ServerProcess, served
from tunix_core.actor.openai_client import Gate
from tunix_core.actor.openai_engine import OpenAIEngine
from tunix_core.actor.policy_engine import Request, TurnEnd
from tunix_core.actor.sampling import request_key
from tunix_core.engine_config import EngineConfig
from tunix_core.errors import ConfigError, EngineUnavailable
from tunix_core.processes import free_port
from tunix_core.tokenizer import ByteTokenizer

PROMPT = [ByteTokenizer.BOS, 65, 66, 67, ByteTokenizer.END_OF_TURN]
TEMPERATURE = 0.7
SEEDS = {0: 0, 5: 1, 6: 2}
DIALECTS = pytest.mark.parametrize("dialect", ["vllm", "sglang"])


class Bench:
    """An engine before the test's server, and its log."""

    def __init__(self, server: ServerProcess, root: Path) -> None:
        self.server = server
        self.root = root
        self.lines: list[str] = []

    def weights(self, version: int) -> Any:
        return served(self.root, SEEDS[version], version)

    def engine(self, urls: tuple[str, ...] = (), **fields: Any) -> OpenAIEngine:
        urls = urls or (self.server.url,)
        quick = {"first_retry_seconds": 0.02, "last_retry_seconds": 0.2, "max_logprob_error": 1e-3}
        config = EngineConfig(kind="openai", base_urls=urls, weights_folder=str(self.root), **{**quick, **fields})
        return OpenAIEngine(
            config,
            urls,
            ACTOR,
            self.weights(0),
            vocab_size=MODEL.vocab_size,
            temperature=TEMPERATURE,
            end_of_turn=ByteTokenizer.END_OF_TURN,
            name="actor-0-0",
            log=self.lines.append,
        )

    def run(self, test: Callable[[OpenAIEngine], Awaitable[None]], *urls: str, **fields: Any) -> None:
        async def inner() -> None:
            engine = self.engine(urls, **fields)
            try:
                await engine.start()
                await test(engine)
            finally:
                await engine.close()

        asyncio.run(asyncio.wait_for(inner(), 240))


@pytest.fixture
def bench(policy_server: ServerProcess, served_root: Path) -> Bench:
    policy_server.faults()
    return Bench(policy_server, served_root)


async def speak(engine: OpenAIEngine, num: int = 1, *, key: str = "faults") -> list[TurnEnd]:
    for i in range(num):
        slot = engine.acquire(Request(key=request_key(key, i), temperature=TEMPERATURE))
        engine.begin_turn(slot, PROMPT)
    return await finish(engine)


async def finish(engine: OpenAIEngine) -> list[TurnEnd]:
    ended: list[TurnEnd] = []
    while engine.busy:
        ended += await engine.advance()
    return ended


def check(engine: OpenAIEngine, ended: list[TurnEnd], version: int = 0) -> None:
    assert ended
    for turn in ended:
        assert turn.failure == ""
        found = engine.transcripts.conversation(turn.slot)
        expected = expected_logprobs(weights(SEEDS[version]), found.tokens, TEMPERATURE)
        np.testing.assert_allclose(found.logprobs[found.loss_mask], expected[found.loss_mask], atol=2e-5)
        assert (found.versions[found.loss_mask] == version).all()


@pytest.mark.parametrize("code", [429, 503])
def test_an_overloaded_server_is_asked_later_and_less(bench: Bench, code: int) -> None:
    async def test(engine: OpenAIEngine) -> None:
        bench.server.faults(status=[code, 6, 0.3])
        started = time.monotonic()
        check(engine, await speak(engine, 6))
        assert time.monotonic() - started >= 0.3, "Retry-After"
        figures = engine.counters.of_kind
        assert figures["overloads"] == 6
        assert figures["request_limit"] == 4, "one overload, one halving"

    bench.run(test, max_concurrent_requests=8)


@pytest.mark.parametrize("fault", ["reset", "truncate", "stall"])
def test_what_breaks_on_the_way_is_asked_again(bench: Bench, fault: str) -> None:
    async def test(engine: OpenAIEngine) -> None:
        bench.server.faults(**{fault: 2})
        check(engine, await speak(engine, 4))
        assert engine.counters.of_kind["retries"] >= 2

    bench.run(test, request_timeout_seconds=1.0)


def test_a_turn_that_is_let_in_as_its_server_dies_is_asked_again(bench: Bench) -> None:
    async def test(engine: OpenAIEngine) -> None:
        bench.server.faults(reset=1)
        check(engine, await speak(engine, 3))

    bench.run(test, max_concurrent_requests=1)


@DIALECTS
@pytest.mark.parametrize("fault", ["lengths", "nan", "vocab"])
def test_a_malformed_answer_costs_its_rollout_and_no_other(bench: Bench, dialect: str, fault: str) -> None:
    async def test(engine: OpenAIEngine) -> None:
        bench.server.faults(**{fault: 1})
        ended = await speak(engine, 4)
        failed = [turn for turn in ended if turn.failure]
        assert [turn.failure for turn in failed] == ["engine_malformed_answer"]
        (turn,) = failed
        assert turn.start == turn.end == engine.transcripts.lengths[turn.slot] == len(PROMPT)
        check(engine, [turn for turn in ended if not turn.failure])
        engine.release(turn.slot)
        check(engine, await speak(engine))

    bench.run(test, dialect=dialect)


def test_retries_end_with_the_kind_of_the_last_trouble(bench: Bench) -> None:
    async def test(engine: OpenAIEngine) -> None:
        bench.server.faults(status=[500, 3, 0])
        (turn,) = await speak(engine)
        assert turn.failure == "engine_http_500"
        bench.server.faults(status=[400, 1, 0])
        engine.release(turn.slot)
        (turn,) = await speak(engine)
        assert turn.failure == "engine_http_400", "a request that is refused is not repeated"

    bench.run(test, max_retries=2)


@DIALECTS
def test_log_probabilities_before_the_temperature_are_refused(bench: Bench, dialect: str) -> None:
    bench.server.faults(raw=True)
    with pytest.raises(ConfigError, match=r"temperature 0\.7.*processed_logprobs"):
        bench.run(speak, dialect=dialect)


@DIALECTS
def test_a_server_that_restarted_gets_its_weights_again(bench: Bench, dialect: str) -> None:
    """Its first weights are of no version: one token from them would show in the comparison."""

    async def test(engine: OpenAIEngine) -> None:
        check(engine, await speak(engine, 2))
        bench.server.faults(restart=0.2)  # with connections open
        await asyncio.sleep(0.05)
        check(engine, await speak(engine, 2, key="open"))
        for slot in range(ACTOR.num_slots):
            engine.release(slot)
        bench.server.faults(restart=0.01, step_seconds=0.05)
        ended = speak(engine, 4, key="under way")
        check(engine, await ended)
        engine.swap(bench.weights(5), 5)
        while engine.version != 5:
            await engine.advance()
        for slot in range(ACTOR.num_slots):
            engine.release(slot)
        check(engine, await speak(engine, 2, key="later"), 5)

    bench.run(test, dialect=dialect)


def test_weights_that_are_lost_without_a_broken_connection_are_noticed(bench: Bench) -> None:
    """Another server behind the same address, as a proxy would have it."""

    async def test(engine: OpenAIEngine) -> None:
        async with engine._session.post(  # the engine's own pool: its connections stay as they are
            f"{bench.server.url}/update_weights_from_disk", json={"model_path": str(bench.weights(6).folder)}
        ):
            pass
        async with engine._session.post(f"{bench.server.url}/update_weight_version", json={"new_version": "default"}):
            pass
        check(engine, await speak(engine, 3))

    bench.run(test)


@DIALECTS
def test_a_reload_that_changes_nothing_raises_an_alarm(bench: Bench, dialect: str) -> None:
    async def test(engine: OpenAIEngine) -> None:
        bench.server.faults(idle_reload=True)
        engine.swap(bench.weights(5), 5)
        while not engine.can_swap():
            await engine.advance()
        assert engine.version == 0
        (alarm,) = engine.counters.alarms
        assert "policy version 5" in alarm
        assert bench.server.url in alarm
        assert any("ALARM actor-0-0" in line for line in bench.lines)
        check(engine, await speak(engine, 2), 0)  # they are of the old weights, and say so
        bench.server.faults(idle_reload=1)
        engine.swap(bench.weights(6), 6)
        while engine.version != 6:
            await engine.advance()
        for slot in range(ACTOR.num_slots):
            engine.release(slot)
        check(engine, await speak(engine, 2, key="after"), 6)
        assert len(engine.counters.alarms) == 1, "a second try that works is no alarm"

    bench.run(test, dialect=dialect)


def test_the_same_weights_again_are_no_alarm(bench: Bench) -> None:
    async def test(engine: OpenAIEngine) -> None:
        engine.swap(dataclasses.replace(bench.weights(0), version=5), 5)
        while engine.version != 5:
            await engine.advance()
        assert engine.counters.alarms == []

    bench.run(test)


@DIALECTS
def test_a_failed_reload_is_tried_again(bench: Bench, dialect: str) -> None:
    async def test(engine: OpenAIEngine) -> None:
        bench.server.faults(failing_reload=2)
        engine.swap(bench.weights(5), 5)
        check(engine, await speak(engine, 2), 5)
        assert engine.version == 5

    bench.run(test, dialect=dialect)


@DIALECTS
def test_an_actor_that_died_amid_a_reload_leaves_nothing_that_looks_complete(bench: Bench, dialect: str) -> None:
    async def first(engine: OpenAIEngine) -> None:
        bench.server.faults(failing_reload=True)
        engine.swap(bench.weights(5), 5)
        while not bench.server.faults(failing_reload=True).get("/update_weight_version", 0) or engine._servers[0].is_up:
            await engine.advance()

    async def second(engine: OpenAIEngine) -> None:
        check(engine, await speak(engine, 2))

    bench.run(first, dialect=dialect)
    bench.server.faults()
    before = bench.server.faults()
    bench.run(second, dialect=dialect)
    path = "/collective_rpc" if dialect == "vllm" else "/update_weights_from_disk"
    assert bench.server.faults()[path] == before[path] + 1


def test_no_server_for_too_long_ends_the_actor(bench: Bench) -> None:
    with pytest.raises(EngineUnavailable, match="gone_after_seconds") as error:
        bench.run(speak, f"http://127.0.0.1:{free_port()}", gone_after_seconds=0.3)
    assert error.value.retryable

    async def test(engine: OpenAIEngine) -> None:
        bench.server.faults(restart=3)
        await asyncio.sleep(0.05)
        await speak(engine)

    with pytest.raises(EngineUnavailable):
        bench.run(test, gone_after_seconds=0.5)
    bench.server.wait()


def test_conversations_stay_with_their_server_and_spread_over_all(bench: Bench) -> None:
    async def test(engine: OpenAIEngine) -> None:
        while engine.counters.of_kind.get("servers_up") != 2:
            await engine.advance()
        check(engine, await speak(engine, 4))
        first = list(engine._sticky[:4])
        assert {first.count(server) for server in engine._servers} == {2}
        for slot in range(4):
            engine.begin_turn(slot, [48, ByteTokenizer.END_OF_TURN])
        check(engine, await finish(engine))
        assert engine._sticky[:4] == first

    # One process under two names: both are loaded and asked.
    bench.run(test, bench.server.url, bench.server.url.replace("127.0.0.1", "localhost"))


def test_the_others_go_on_when_a_server_is_away(bench: Bench) -> None:
    async def test(engine: OpenAIEngine) -> None:
        check(engine, await speak(engine, 4))
        assert engine.counters.of_kind["servers_up"] == 1

    bench.run(test, bench.server.url, f"http://127.0.0.1:{free_port()}")


def test_the_key_comes_from_the_environment_and_goes_nowhere_else(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.server.faults(key="hunter2")
    with pytest.raises(ConfigError, match="401"):
        bench.run(speak)
    with pytest.raises(ConfigError, match="TUNIX_ENGINE_KEY_TEST"):
        bench.run(speak, api_key_variable="TUNIX_ENGINE_KEY_TEST")
    monkeypatch.setenv("TUNIX_ENGINE_KEY_TEST", "hunter2")

    async def test(engine: OpenAIEngine) -> None:
        bench.server.faults(key="hunter2", status=[500, 1, 0], reset=1)
        check(engine, await speak(engine, 2))

    bench.run(test, api_key_variable="TUNIX_ENGINE_KEY_TEST")
    assert "hunter2" not in "\n".join(bench.lines)


def test_a_server_with_too_short_a_context_or_another_name_is_refused(bench: Bench) -> None:
    with pytest.raises(ConfigError, match=r"engine\.model_name"):
        bench.run(speak, model_name="gpt")
    engine = bench.engine()
    engine._needs = engine._needs._replace(context_tokens=4096)

    async def start() -> None:
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(ConfigError, match=r"actor\.context_tokens.*at most 48"):
        asyncio.run(start())


def test_a_folder_that_a_server_cannot_see_keeps_it_out(bench: Bench, tmp_path: Path) -> None:
    gone = dataclasses.replace(bench.weights(5), folder=tmp_path / "elsewhere")

    async def test(engine: OpenAIEngine) -> None:
        engine.swap(gone, 5)
        while engine.counters.of_kind.get("servers_up") != 0:
            await engine.advance()
        shutil.copytree(bench.weights(5).folder, gone.folder)
        check(engine, await speak(engine, 2), 5)

    bench.run(test)


def test_hundreds_of_turns_wait_for_a_few_places(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    taken = Gate._taken

    def watched(gate: Gate) -> None:
        nonlocal most
        taken(gate)
        most = max(most, gate.active)

    monkeypatch.setattr(Gate, "_taken", watched)

    async def test(engine: OpenAIEngine) -> None:
        check(engine, await speak(engine, 300, key="many"))

    monkeypatch.setattr("tests.actor.test_openai_engine.ACTOR", dataclasses.replace(ACTOR, num_slots=300))
    bench.run(test, max_concurrent_requests=7)
    assert most == 7

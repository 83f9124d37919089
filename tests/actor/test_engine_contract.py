"""The suite of `engine_contract` against the decoder here, and against a server in both dialects."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.actor.engine_contract import SEEDS, TEMPERATURE, EngineContract, Kind
from tests.actor.support import ACTOR, MODEL, engine, weights
from tests.support.server_process import ServerProcess, served
from tunix_core.actor.engine import Engine
from tunix_core.actor.openai_engine import OpenAIEngine
from tunix_core.actor.policy_engine import PolicyEngine, TurnEnd
from tunix_core.engine_config import EngineConfig
from tunix_core.tokenizer import ByteTokenizer


class DecoderKind:
    same_key_same_draws = True

    def engine(self, **actor_fields: Any) -> Engine:
        return engine(self.weights(0), 0, **actor_fields)

    async def amid_turns(self, engine: PolicyEngine) -> list[TurnEnd]:
        return await engine.advance()

    def weights(self, version: int) -> Any:
        return weights(SEEDS[version])


class ServerKind:
    """The test's server keeps to its seeds; see `openai_engine` for what others promise."""

    same_key_same_draws = True

    def __init__(self, server: ServerProcess, root: Path, dialect: str) -> None:
        self._server = server
        self._root = root
        self._config = EngineConfig(
            kind="openai",
            dialect=dialect,  # type: ignore[arg-type]
            base_urls=(server.url,),
            weights_folder=str(root),
            max_logprob_error=1e-3,
        )

    def engine(self, **actor_fields: Any) -> OpenAIEngine:
        immediate = actor_fields.get("swap_policy") == "immediate"
        self._server.faults(**({"dispatches": 1} if immediate else {"step_seconds": 0.02}))
        return OpenAIEngine(
            self._config,
            [self._server.url],
            dataclasses.replace(ACTOR, **actor_fields),
            self.weights(0),
            vocab_size=MODEL.vocab_size,
            temperature=TEMPERATURE,
            end_of_turn=ByteTokenizer.END_OF_TURN,
            decode=ByteTokenizer().decode,
        )

    async def amid_turns(self, engine: PolicyEngine) -> list[TurnEnd]:
        ended = await engine.advance()  # every request is at least at its server's gate
        while self._server.left("dispatches"):
            ended += await engine.advance()
        return ended

    def weights(self, version: int) -> Any:
        return served(self._root, SEEDS[version], version)


class TestDecoder(EngineContract):
    @pytest.fixture
    def kind(self) -> Kind:
        return DecoderKind()


class TestServer(EngineContract):
    @pytest.fixture(params=["vllm", "sglang"])
    def kind(self, request: pytest.FixtureRequest, policy_server: ServerProcess, served_root: Path) -> Kind:
        return ServerKind(policy_server, served_root, request.param)

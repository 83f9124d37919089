"""The engine against vLLM itself, on CPU: `make vllm` builds its environment and runs this.

TUNIX_VLLM_PYTHON names the interpreter that has it. A start takes minutes: there is one for all.
"""

import asyncio
import dataclasses
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tunix_core.actor.openai_engine import OpenAIEngine
from tunix_core.actor.openai_server import ServedWeights
from tunix_core.actor.policy_engine import Request, TurnEnd
from tunix_core.actor.sampling import request_key
from tunix_core.config import ActorConfig, ModelConfig
from tunix_core.engine_config import EngineConfig
from tunix_core.errors import ConfigError
from tunix_core.models import decoder, huggingface
from tunix_core.models.parameters import flatten_parameters
from tunix_core.pretrained.exporting import export_model
from tunix_core.processes import free_port

PYTHON = os.environ.get("TUNIX_VLLM_PYTHON", "")
START_SECONDS = 900.0
# The smallest heads that its attention on CPU takes.
MODEL = ModelConfig(model_width=32, num_layers=2, num_heads=2, num_kv_heads=1, head_width=32, mlp_width=16)
ACTOR = ActorConfig(num_slots=8, context_tokens=96, max_turn_tokens=24)
TEMPERATURE = 0.7
END, PROMPT, REPLY = 257, [256, 65, 66, 67, 257], [48, 49, 257]
SEEDS = {0: 0, 5: 1, 9: 2}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON, reason="TUNIX_VLLM_PYTHON names no interpreter with vLLM"),
]


def parameters(seed: int) -> Any:
    params = jax.tree.map(np.array, decoder.init_parameters(MODEL, seed))
    params["head"] *= 20
    return params


def served(root: Path, version: int) -> ServedWeights:
    folder, seed = root / str(version), SEEDS[version]
    if not folder.exists():
        hf_config = huggingface.hf_config(MODEL, context_tokens=ACTOR.context_tokens)
        export_model(folder, MODEL, flatten_parameters(parameters(seed)), hf_config=hf_config, texts={})
    return ServedWeights(folder=folder, version=version, digest=f"{seed:064x}")


class Vllm:
    def __init__(self, root: Path, mode: str) -> None:
        self.root = root
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        environment = os.environ | {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        arguments = f"""--served-model-name policy --skip-tokenizer-init --dtype float32 --max-model-len {ACTOR.context_tokens}
            --logprobs-mode {mode} --host 127.0.0.1 --port {port} --enforce-eager --max-num-seqs 16""".split()
        self.log = (root / f"vllm-{mode}.log").open("w+")
        self.process = subprocess.Popen(
            [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(served(root, 0).folder), *arguments],
            env=environment, cwd=root, stdout=self.log, stderr=self.log, start_new_session=True,
        )  # fmt: skip

    def wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, Path(self.log.name).read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(1)
        raise AssertionError(Path(self.log.name).read_text()[-3000:])

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    server = Vllm(tmp_path_factory.mktemp("vllm"), "processed_logprobs")
    server.wait()
    yield server
    server.close()


def engine(server: Vllm, lines: list[str], **actor: Any) -> OpenAIEngine:
    config = EngineConfig(
        kind="openai", base_urls=(server.url,), weights_folder=str(server.root), max_logprob_error=1e-3
    )
    return OpenAIEngine(
        config, [server.url], dataclasses.replace(ACTOR, **actor), served(server.root, 0), vocab_size=MODEL.vocab_size,
        temperature=TEMPERATURE, end_of_turn=END, log=lines.append,
    )  # fmt: skip


def run(subject: OpenAIEngine, test: Any) -> None:
    async def inner() -> None:
        try:
            await subject.start()
            await test(subject)
        finally:
            await subject.close()

    asyncio.run(inner())


async def finish(subject: OpenAIEngine) -> list[TurnEnd]:
    ended: list[TurnEnd] = []
    while subject.busy:
        ended += await subject.advance()
    return ended


async def speak(subject: OpenAIEngine, slots: list[int], ids: list[int]) -> list[TurnEnd]:
    for slot in slots:
        subject.begin_turn(slot, ids)
    return await finish(subject)


def check(subject: OpenAIEngine, slot: int) -> set[int]:
    """Log probabilities by our own forward pass with the weights of each token's version."""
    found = subject.transcripts.conversation(slot)
    mask = found.loss_mask
    length = len(found.tokens)
    tokens = np.zeros((1, ACTOR.context_tokens), np.int32)
    tokens[0, :length] = found.tokens
    segments = (np.arange(ACTOR.context_tokens) < length).astype(np.int32)[None]
    versions = set(found.versions[mask].tolist())
    for version in versions:
        params = parameters(SEEDS[version])
        hidden = decoder.hidden_states(params, MODEL, tokens, np.arange(ACTOR.context_tokens)[None], segments)
        scores, _ = decoder.token_logprobs(
            params,
            MODEL,
            hidden[:, :-1],
            tokens[:, 1:],
            np.full((1, ACTOR.context_tokens - 1), TEMPERATURE, np.float32),
        )
        mine = mask & (found.versions == version)
        np.testing.assert_allclose(found.logprobs[mine], np.r_[0, np.asarray(scores)[0]][:length][mine], atol=1e-4)
    return versions


def acquire(subject: OpenAIEngine, num: int, name: str) -> list[int]:
    return [subject.acquire(Request(key=request_key(name, i), temperature=TEMPERATURE)) for i in range(num)]


def test_turns_versions_and_draws(vllm: Vllm) -> None:
    async def test(subject: OpenAIEngine) -> None:
        slots = acquire(subject, 6, "turns")
        for turn in await speak(subject, slots, PROMPT):
            assert not turn.failure
        for version in (5, 9):
            subject.swap(served(vllm.root, version), version)
            while subject.version != version:
                await subject.advance()
            for turn in await speak(subject, slots, REPLY):
                assert not turn.failure
        assert {version for slot in slots for version in check(subject, slot)} == {0, 5, 9}
        first = [subject.transcripts.conversation(slot).tokens.tolist() for slot in slots]
        assert len({tuple(tokens) for tokens in first}) == len(first)
        for slot in slots:
            subject.release(slot)
        drawn = []
        for _ in range(2):
            slots = acquire(subject, 3, "same")
            await speak(subject, slots, PROMPT)
            drawn.append([subject.transcripts.conversation(slot).tokens.tolist() for slot in slots])
            for slot in slots:
                subject.release(slot)
        assert drawn[0] == drawn[1]

    lines: list[str] = []
    run(engine(vllm, lines), test)
    assert lines == []


def test_turns_go_on_over_an_immediate_swap(vllm: Vllm) -> None:
    async def test(subject: OpenAIEngine) -> None:
        slots = acquire(subject, 6, "swap")
        for slot in slots:
            subject.begin_turn(slot, PROMPT, 64)
        while not subject.counters.of_kind["requests"]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        subject.swap(served(vllm.root, 5), 5)
        for turn in await finish(subject):
            assert not turn.failure
        found = [check(subject, slot) for slot in slots]
        assert subject.version == 5
        assert {5} in found or {0, 5} in found

    run(engine(vllm, [], swap_policy="immediate", max_turn_tokens=64), test)


def test_raw_log_probabilities_are_refused(tmp_path: Path) -> None:
    """vLLM's own default."""
    server = Vllm(tmp_path, "raw_logprobs")
    try:
        server.wait()
        with pytest.raises(ConfigError, match="processed_logprobs"):
            run(engine(server, []), finish)
    finally:
        server.close()

"""One server's life: found, checked, given weights by version, and watched for having lost them.

A server's weights are called by a label, version and digest, which the server itself keeps and
reports. Whoever takes a server over, or finds it restarted, sees from it what is loaded. While weights
change the label says so: an actor that dies in between leaves nothing that looks complete.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tunix_core.actor.openai_client import Client, Gate, Refused, Trouble, Unreachable
from tunix_core.actor.openai_dialects import (
    Call,
    Dialect,
    Generation,
    MalformedAnswer,
    Probe,
    Sampling,
    checked,
    succeeded,
    weight_version,
)
from tunix_core.engine_config import EngineConfig
from tunix_core.errors import ConfigError

LOADING = "tunix-loading"
"""Label of weights that may be half of one version and half of another."""

PROBE_TOKENS = 24
PROBE_VOCAB = 1024
NUM_PROBES = 3
MIN_SPREAD = 0.02
"""Of two tokens' log probabilities, in nats, below which a probe cannot tell temperatures apart."""
CACHE_RESETS = 5
ABORT_SECONDS = 0.5
"""How long aborted requests may take to come back before it is tried once more."""


@dataclasses.dataclass(eq=False)
class ServedWeights:
    """A version as a Hugging Face folder that servers read."""

    folder: Path
    version: int
    digest: str
    """SHA-256 of the safetensors files; the same for the same bytes."""
    in_use: bool = False
    """A server has it, or will have to load it again after a restart."""

    @property
    def label(self) -> str:
        return f"{self.version}-{self.digest[:16]}"


class Needs(NamedTuple):
    """What a run asks of a server."""

    vocab_size: int
    context_tokens: int
    temperature: float
    abort_at_swap: bool
    """Stop turns that are under way; else they end with the weights they began with."""


class _Fingerprint(NamedTuple):
    """Log probabilities of the fixed prompt, and how much they vary without a change."""

    digest: str
    values: np.ndarray
    noise: float


class Server:
    """Requests, weights and checks of one server; belongs to one event loop.

    Args:
        alarm: takes a line that a person must see.
    """

    def __init__(
        self, client: Client, dialect: Dialect, config: EngineConfig, needs: Needs, alarm: Callable[[str], None]
    ) -> None:
        self.url = client.url
        self.gate = Gate(config.max_concurrent_requests)
        self.weights: ServedWeights | None = None
        """What it speaks with; None as long as that is not known."""
        self.refused: ServedWeights | None = None
        """A version whose load changed nothing: not tried again."""
        self.is_up = False
        self.is_loading = False
        self.attention = asyncio.Event()
        """Set when its keeper has something to look after."""
        self.trouble_since: float | None = time.monotonic()
        self.last_trouble = "no answer yet"
        self.swap_seconds = 0.0
        self._client = client
        self._dialect = dialect
        self._config = config
        self._needs = needs
        self._alarm = alarm
        self._fingerprint: _Fingerprint | None = None
        self._running_check: asyncio.Task[str] | None = None
        self._next_check: asyncio.Task[str] | None = None
        rng = np.random.default_rng(0)
        high, size = min(PROBE_VOCAB, needs.vocab_size), min(PROBE_TOKENS, needs.context_tokens - 1)
        self._probes: list[list[int]] = rng.integers(0, high, (NUM_PROBES, size)).tolist()

    # -- turns ---------------------------------------------------------------------------------

    async def generate(self, ids: Sequence[int], how: Sampling) -> tuple[Generation, int]:
        """Tokens, and the version that drew them; waits for admission.

        Raises:
            Trouble: nothing came.
            MalformedAnswer: what came is no message.
        """
        await self.gate.enter()
        try:
            weights = self.weights
            if weights is None:  # who broke off let it in, and took the server down in the same moment
                raise Unreachable("engine_connection", self.last_trouble)
            call = self._dialect.generate(self._config.model_name, ids, how)
            answer = await self._client.request(call, self._config.request_timeout_seconds)
            generation = checked(self._dialect.generation(answer), how, self._needs.vocab_size)
            # Asked for after the answer: a server that restarted before it has forgotten its label.
            found = generation.version if self._dialect.echoes_version else await self._version_from_now()
        finally:
            self.gate.leave()
        if found != weights.label:
            raise Unreachable("engine_version", f"{self.url}: received weights {found!r}, accepted {weights.label!r}")
        self.gate.served()
        return generation, weights.version

    def down(self, trouble: BaseException) -> None:
        """It may be another process by now: nothing that was known of it holds."""
        if self.trouble_since is None:
            self.trouble_since = time.monotonic()
        self.last_trouble = str(trouble)
        self.is_up = False
        self.weights = self._fingerprint = None
        self.gate.turn_away(Unreachable("engine_connection", str(trouble)))
        self.attention.set()

    # -- weights -------------------------------------------------------------------------------

    async def bring_up(self, weights: ServedWeights) -> None:
        """From an address to a server that speaks with `weights`.

        Raises:
            Trouble: not now.
            ConfigError: not as it was started.
        """
        await self._check_model()
        await self._control(self._dialect.resume())  # whoever had it before may have died while it was paused
        if await self._version() == weights.label:
            self._fingerprint = await self._measure(weights)
            self.weights = weights
        else:
            # One broken connection is no dead server: others may still be answered, by the weights they began with.
            await self.gate.drained()
            await self._load(weights)
        await self._check_temperature()
        self._opened()

    async def update(self, weights: ServedWeights) -> None:
        """From one version to the next; `refused` says where nothing changed. Raises Trouble."""
        started = time.perf_counter()
        self.gate.close()
        if self._needs.abort_at_swap:
            await self._abort_all()
        await self.gate.drained()
        await self._load(weights)
        self.swap_seconds += time.perf_counter() - started
        self._opened()

    async def _abort_all(self) -> None:
        """A request that comes to a paused server waits there, out of an abort's reach: it is let in and aborted too."""
        while self.gate.active:
            await self._control(self._dialect.pause())
            try:
                async with asyncio.timeout(ABORT_SECONDS):
                    await self.gate.drained()
            except TimeoutError:
                await self._control(self._dialect.resume())

    def _opened(self) -> None:
        self.is_up = True
        self.trouble_since = None
        self.gate.open()

    async def _load(self, weights: ServedWeights) -> None:
        """Load, look whether anything changed, and only then call it by its name."""
        before, old = self._fingerprint, self.weights
        self.is_loading = True
        try:
            await self._control(self._dialect.set_version(LOADING))
            for attempt in (1, 2):
                for call in self._dialect.load(str(weights.folder)):
                    await self._carry_out(call)
                await self._control(self._dialect.resume())
                found = await self._measure(weights)
                change = np.inf if before is None else float(np.abs(found.values - before.values).max())
                if before is None or before.digest == weights.digest or change > max(found.noise, before.noise):
                    break
                if attempt == 2:
                    assert old is not None
                    self._alarm(
                        f"weights did not arrive: {self.url} was told to load policy version {weights.version} and reported "
                        f"success, but its log probabilities of a fixed prompt are those of version {old.version} "
                        f"(change {change:.2g}, noise {max(found.noise, before.noise):.2g}); its tokens count as version {old.version}"
                    )
                    await self._control(self._dialect.set_version(old.label))
                    self.refused = weights
                    return
            await self._expect(LOADING)  # a server that restarted meanwhile has other weights, and says so
            await self._control(self._dialect.set_version(weights.label))
            await self._expect(weights.label)
            self._fingerprint, self.weights = found, weights
        finally:
            self.is_loading = False

    async def _carry_out(self, call: Call) -> None:
        """A step of a load. vLLM's cache is only reset once no block is held: a moment after the last answer."""
        for _ in range(CACHE_RESETS):
            answer = await self._client.request(call, self._config.reload_timeout_seconds)
            if succeeded(answer):
                return
            await asyncio.sleep(self._config.first_retry_seconds)
        raise Trouble("engine_reload", f"{self.url}{call.path}: {str(answer)[:400]}")

    # -- checks --------------------------------------------------------------------------------

    async def _check_model(self) -> None:
        try:
            answer = await self._control(Call("GET", "/v1/models"))
        except Refused as error:
            if error.status not in (401, 403):
                raise
            variable = self._config.api_key_variable
            raise ConfigError(
                "engine.api_key_variable",
                variable,
                f"the name of a variable that holds the key of {self.url} (it answered {error.status})",
                "Set it in the environment of the actors.",
            ) from error
        entries = answer.get("data") if isinstance(answer, dict) else None
        models = {str(e.get("id")): e for e in entries or [] if isinstance(e, dict)}
        name = self._config.model_name if self._dialect.has_names else next(iter(models), "")
        if name not in models:
            raise ConfigError(
                "engine.model_name", name, f"one that {self.url} serves: {', '.join(sorted(models))}", "Choose it."
            )
        limit = models[name].get("max_model_len")
        if isinstance(limit, int) and limit < self._needs.context_tokens:
            raise ConfigError(
                "actor.context_tokens",
                self._needs.context_tokens,
                f"at most {limit}, what {self.url} serves",
                "Lower it, or start the server with a longer context.",
            )

    async def _check_temperature(self) -> None:
        """Log probabilities are those of the distribution that is drawn from, not the ones before the temperature.

        Two tokens' log probabilities differ by d at temperature 1 and by d / T at T.
        """
        temperature = self._needs.temperature
        if temperature == 1.0:
            return
        spread = 0.0
        for ids in self._probes:
            base, scaled = await self._probe(ids, 1.0), await self._probe(ids, temperature)
            both = sorted(base.top.keys() & scaled.top.keys(), key=lambda token: base.top[token])
            if len(both) < 2:
                continue
            at_one = base.top[both[-1]] - base.top[both[0]]
            found = scaled.top[both[-1]] - scaled.top[both[0]]
            spread = max(spread, at_one)
            if at_one >= MIN_SPREAD and abs(found - at_one / temperature) > self._config.max_logprob_error:
                raise ConfigError(
                    "engine.base_urls",
                    self.url,
                    f"a server that returns log probabilities at temperature {temperature}: those of two tokens differ by "
                    f"{found:.4f}, accepted {at_one / temperature:.4f} (raw: {at_one:.4f})",
                    "Start vLLM with --logprobs-mode processed_logprobs, SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB.",
                )
        if spread < MIN_SPREAD:
            self._alarm(f"{self.url}: the policy is too flat to tell at which temperature its log probabilities are")

    async def _measure(self, weights: ServedWeights) -> _Fingerprint:
        first, second = [np.array((await self._probe(self._probes[0], 1.0)).prompt) for _ in range(2)]
        if first.shape != second.shape or len(first) != len(self._probes[0]) - 1:
            raise MalformedAnswer(f"{self.url}: {len(first)} log probabilities of a prompt of {len(self._probes[0])}")
        return _Fingerprint(weights.digest, first, float(np.abs(first - second).max()))

    async def _probe(self, ids: Sequence[int], temperature: float) -> Probe:
        call = self._dialect.probe(self._config.model_name, ids, temperature)
        return self._dialect.probed(await self._client.request(call, self._config.request_timeout_seconds))

    # -- control -------------------------------------------------------------------------------

    async def _control(self, call: Call) -> Any:
        answer = await self._client.request(call, self._config.request_timeout_seconds)
        if not succeeded(answer):
            raise Trouble("engine_control", f"{self.url}{call.path}: {str(answer)[:400]}")
        return answer

    async def _version(self) -> str:
        try:
            return weight_version(
                await self._client.request(self._dialect.version(), self._config.request_timeout_seconds)
            )
        except Refused as error:
            if error.status != 404:
                raise
            raise ConfigError(
                "engine.base_urls", self.url, "a server that tells its weight version", self._dialect.dev_mode_hint
            ) from error

    async def _expect(self, label: str) -> None:
        reported = await self._version()
        if reported != label:
            raise Trouble("engine_version", f"{self.url}: received weights {reported!r}, accepted {label!r}")

    async def _version_from_now(self) -> str:
        """The version by a request that is sent after this call; those who ask meanwhile share the next one."""
        if self._next_check is None:
            self._next_check = asyncio.ensure_future(self._check_after(self._running_check))
            self._next_check.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._next_check)

    async def _check_after(self, before: asyncio.Task[str] | None) -> str:
        if before is not None:
            await asyncio.wait([before])
        self._running_check, self._next_check = self._next_check, None
        return await self._version()

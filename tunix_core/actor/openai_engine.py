"""A policy engine that decodes nowhere itself: each turn is a request to a server, token ids in, token ids out.

The ids a server drew are stored as they came and sent back as they are stored; no text is made of them
on the way. A turn's draws are seeded by the conversation's key and the position: with the same weights,
server and numerics the same key draws the same tokens, as far as the server keeps to its seed (vLLM does
for each request; SGLang only with deterministic inference). A batch's composition may change the last
bits of a server's logits, so unlike the decoder here it is no promise to the bit.

Servers hold one version each. `turn`: no turn begins on a server whose weights are about to change, those
under way end first. `immediate`: they are aborted, what was drawn is kept under its version, and goes on
with the new weights from ids alone, so nothing of an older version's cache is read. Serving old weights to
the end of an episode would take a second copy of the weights in the server, so `finish` is refused.

A conversation stays with its server, whose prefix cache knows it, as long as that one is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Sequence

import aiohttp
import numpy as np

from tunix_core.actor.openai_client import Client, Overloaded, Trouble, Unreachable, pause_seconds
from tunix_core.actor.openai_dialects import DIALECTS, MalformedAnswer, Sampling
from tunix_core.actor.openai_server import Needs, ServedWeights, Server
from tunix_core.actor.policy_engine import NO_VERSION, EngineCounters, Request, Transcripts, TurnEnd, TurnReason
from tunix_core.actor.stopping import Decode, StopScanner
from tunix_core.config import ActorConfig
from tunix_core.engine_config import EngineConfig
from tunix_core.errors import ConfigError, EngineUnavailable
from tunix_core.validation import require

ADVANCE_SECONDS = 0.05
"""Longest wait for a turn to end: the actor looks after other things meanwhile."""

FREE, PARKED, SPEAKING = range(3)


class OpenAIEngine:
    """N slots over S servers; a `PolicyEngine`.

    Args:
        urls: of this engine's own servers.
        actor: slots, context, limits, swap policy.
        weights: of `weights.version`, which the servers are given at the start.
        vocab_size: of the policy; a token outside is no token.
        temperature: of the run, at which servers are checked.
        end_of_turn: the id with which the policy ends a turn.
        decode: ids to text, where stop strings are to be seen. Only looks: what is stored are the ids.
        name: of the process, in alarms.
        log: takes a line for a person.
    """

    def __init__(
        self,
        config: EngineConfig,
        urls: Sequence[str],
        actor: ActorConfig,
        weights: ServedWeights,
        *,
        vocab_size: int,
        temperature: float,
        end_of_turn: int,
        decode: Decode | None = None,
        name: str = "engine",
        log: Callable[[str], None] = lambda _line: None,
    ) -> None:
        assert urls, "an engine without servers"
        self.context_tokens = actor.context_tokens
        self.version = weights.version
        self.counters = EngineCounters()
        self.counters.of_kind = dict.fromkeys(("requests", "retries", "overloads", "failed_requests", "servers_up"), 0)
        self.transcripts = Transcripts(actor.num_slots, actor.context_tokens)
        self._config = config
        self._urls = [url.rstrip("/") for url in urls]
        self._actor = actor
        self._end_of_turn = end_of_turn
        self._stop_ids = (end_of_turn, *actor.stop_ids)
        self._decode = decode
        self._vocab_size = vocab_size
        self._name = name
        self._log = log
        self._key = _api_key(config)
        self._needs = Needs(vocab_size, actor.context_tokens, temperature, actor.swap_policy == "immediate")
        self._target = weights
        self._target.in_use = True
        self._older: list[ServedWeights] = []
        """Still loaded somewhere."""
        self._settled = True
        self._state = np.full(actor.num_slots, FREE, np.int8)
        self._requests: list[Request | None] = [None] * actor.num_slots
        self._sticky: list[Server | None] = [None] * actor.num_slots
        self._turns: dict[int, asyncio.Task[None]] = {}
        self._ended: list[TurnEnd] = []
        self._wake = asyncio.Event()
        self._servers: list[Server] = []
        self._session: aiohttp.ClientSession | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self._any_up = asyncio.Event()
        self._next_server = 0
        self._fatal: BaseException | None = None

    # -- slots ---------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return int((self._state == FREE).sum())

    @property
    def num_parked(self) -> int:
        return int((self._state == PARKED).sum())

    @property
    def busy(self) -> bool:
        return bool(self._turns or self._ended)

    def acquire(self, request: Request) -> int:
        """See `PolicyEngine`.

        Raises:
            ConfigError: sampling that is no training's, or stop strings that it cannot see.
        """
        require(
            not (request.greedy or request.truncated),
            "request",
            "greedy, top_k, top_p or min_p",
            "temperature alone",
            "Servers generate for training; evaluation decodes in its own process.",
        )
        require(
            not request.stop_strings or self._decode is not None,
            "request.stop_strings",
            request.stop_strings,
            "none without a tokenizer",
            "Make the engine with `decode`.",
        )
        slot = int(np.argmax(self._state == FREE))
        assert self._state[slot] == FREE, "acquire without a free slot"
        self._state[slot] = PARKED
        self._requests[slot] = request
        self._sticky[slot] = None
        self.transcripts.clear(slot)
        return slot

    def release(self, slot: int) -> None:
        self._state[slot] = FREE
        turn = self._turns.pop(slot, None)
        if turn is not None:
            turn.cancel()  # closes the connection, which tells the server
        self._ended = [end for end in self._ended if end.slot != slot]

    def room(self, slot: int) -> int:
        return self.context_tokens - int(self.transcripts.lengths[slot]) - 1

    def begin_turn(self, slot: int, ids: list[int], max_tokens: int | None = None) -> None:
        assert self._state[slot] == PARKED, "begin_turn on a slot that is not parked"
        assert 0 < len(ids) <= self.room(slot), "begin_turn without room"
        limit = self._actor.max_turn_tokens
        if max_tokens is not None:
            require(max_tokens >= 1, "max_tokens", max_tokens, "at least 1", "A turn has at least one token.")
            limit = min(limit, max_tokens)
        before = int(self.transcripts.lengths[slot])
        start = before + len(ids)
        self.transcripts.tokens[slot, before:start] = ids
        self.transcripts.lengths[slot] = start
        self._state[slot] = SPEAKING
        self._ensure_running()
        limit = min(start + limit, self.context_tokens)
        turn = asyncio.get_running_loop().create_task(self._turn(slot, start, limit))
        self._turns[slot] = turn
        turn.add_done_callback(lambda task: self._turn_done(slot, task))

    # -- weights -------------------------------------------------------------------------------

    def can_swap(self) -> bool:
        """One change at a time; while no server is there the newest version waits its turn."""
        self._raise_if_over()
        return self._settled

    def swap(self, weights: ServedWeights, version: int) -> None:
        """See `PolicyEngine`; servers are given them one by one, as each has ended or dropped its turns."""
        assert self.can_swap(), "swap while another is under way"
        assert weights.version == version, "weights of another version"
        self._ensure_running()
        self._older.append(self._target)
        self._target = weights
        self._target.in_use = True
        self._settled = False
        for server in self._servers:
            server.attention.set()

    def _settle(self) -> None:
        """The version is that of the server that is furthest behind; one that is away is given the newest on its return."""
        up = [server for server in self._servers if server.is_up]
        if not up:
            return
        found = [server.weights for server in up if server.weights is not None]
        self.version = max(self.version, min(weights.version for weights in found))
        if all(server.weights is self._target or server.refused is self._target for server in up):
            if not self._settled:
                self._settled = True
                self.counters.swaps += 1
                self.counters.swap_seconds = sum(server.swap_seconds for server in self._servers)
            for weights in [w for w in self._older if w not in found]:
                weights.in_use = False
                self._older.remove(weights)
        self._wake.set()

    # -- servers -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns once a server speaks with the first weights.

        Raises:
            ConfigError: a server is not what it must be.
            EngineUnavailable: none answered.
        """
        self._ensure_running()
        while not self._any_up.is_set():
            self._raise_if_over()
            await self._woken()
        self._raise_if_over()

    def _ensure_running(self) -> None:
        """Sessions and tasks belong to the loop that runs, so they are made when there is one."""
        if self._session is not None:
            return
        # Requests wait for their turn at a server's gate, not for a connection.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        for url in self._urls:
            client = Client(self._session, url, self._config, self._key)
            server = Server(client, DIALECTS[self._config.dialect], self._config, self._needs, self._raise_alarm)
            self._servers.append(server)
            server.attention.set()
        self._keepers = [asyncio.ensure_future(self._keep(server)) for server in self._servers]
        for keeper in self._keepers:
            keeper.add_done_callback(self._keeper_done)

    async def _keep(self, server: Server) -> None:
        """Bring a server up, give it new weights, and bring it up again after each trouble."""
        failures = 0
        while True:
            await server.attention.wait()
            server.attention.clear()
            try:
                target = self._target
                if not server.is_up:
                    await server.bring_up(target)
                elif server.weights is not target and server.refused is not target:
                    await server.update(target)
                failures = 0
                self._any_up.set()
                pause = 0.0
            except (Trouble, MalformedAnswer) as trouble:
                failures += 1
                pause = max(pause_seconds(self._config, failures), getattr(trouble, "retry_after_seconds", 0.0))
                server.down(trouble)
                if failures == 1:
                    self._log(f"{server.url} is away: {trouble}")
            if server.weights is not self._target and server.refused is not self._target:
                server.attention.set()
            if not any(other.is_up for other in self._servers):
                self._any_up.clear()
            self._settle()
            self._count_servers()
            await asyncio.sleep(pause)

    def _keeper_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._fatal = task.exception()
            self._wake.set()

    def _raise_if_over(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        since = [server.trouble_since for server in self._servers if not server.is_loading]
        if since and len(since) == len(self._servers) and all(since):
            seconds = time.monotonic() - max(moment for moment in since if moment is not None)
            if seconds > self._config.gone_after_seconds:
                lines = "; ".join(f"{server.url}: {server.last_trouble}" for server in self._servers)
                raise EngineUnavailable(
                    f"no server for {seconds:.0f} s, accepted {self._config.gone_after_seconds} "
                    f"(engine.gone_after_seconds): {lines}"
                )

    def _raise_alarm(self, text: str) -> None:
        self.counters.alarms.append(text)
        self._log(f"ALARM {self._name}: {text}")

    async def _server_for(self, slot: int) -> Server:
        """The conversation's own, or the next one in turn when it has none that is there."""
        while True:
            mine = self._sticky[slot]
            if mine is not None and mine.is_up:
                return mine
            up = [server for server in self._servers if server.is_up]
            if up:
                self._next_server += 1
                self._sticky[slot] = up[self._next_server % len(up)]
                continue
            await self._any_up.wait()

    # -- turns ---------------------------------------------------------------------------------

    async def advance(self) -> list[TurnEnd]:
        self._raise_if_over()
        if not self._ended:
            await self._woken()
            self._raise_if_over()
        self._count_servers()
        ended, self._ended = self._ended, []
        for end in ended:
            self._state[end.slot] = PARKED
        return ended

    async def _woken(self) -> None:
        """Something happened, or a moment has passed."""
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ADVANCE_SECONDS):
                await self._wake.wait()

    async def close(self) -> None:
        tasks = [*self._turns.values(), *self._keepers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._turns.clear()
        if self._session is not None:
            await self._session.close()

    async def _turn(self, slot: int, start: int, limit: int) -> None:
        """From the prompt's end to the end of the turn, over as many requests as it takes."""
        request = self._requests[slot]
        assert request is not None
        strings = (*self._actor.stop_strings, *request.stop_strings)
        scanner = StopScanner(self._decode, strings) if strings and self._decode else None
        reason: TurnReason = ""
        failure = ""
        failures = 0
        while not (reason or failure):
            server = await self._server_for(slot)
            try:
                reason, num_tokens = await self._request(server, slot, request, limit, scanner)
                failures += num_tokens == 0  # aborted before its first token: by us, or by whoever else can
            except MalformedAnswer as error:
                failure = self._failed("engine_malformed_answer", f"{server.url}: {error}")
            except Trouble as trouble:
                failures += 1
                if failures > self._config.max_retries or not trouble.retry:
                    failure = self._failed(trouble.kind, str(trouble))
                else:
                    await self._await_retry(server, trouble, failures)
            if failures > self._config.max_retries and not (reason or failure):
                failure = self._failed("engine_aborted", f"{server.url}: {failures} times")
        if failure:
            self.transcripts.lengths[slot] = start
            self.transcripts.loss_mask[slot, start:] = False
            self.transcripts.logprobs[slot, start:] = 0
            self.transcripts.versions[slot, start:] = NO_VERSION
        end = int(self.transcripts.lengths[slot])
        self._ended.append(TurnEnd(slot, start, end, reason == "end_of_turn", failure, reason))
        self._wake.set()

    async def _request(
        self, server: Server, slot: int, request: Request, limit: int, scanner: StopScanner | None
    ) -> tuple[TurnReason, int]:
        """Ask for what fits below `limit` and store it; why the turn is over, if it is, and the number of tokens drawn."""
        transcripts, counters = self.transcripts, self.counters
        at = int(transcripts.lengths[slot])
        how = Sampling(
            max_tokens=limit - at,
            temperature=request.temperature,
            seed=_seed(request.key, at),
            stop_ids=self._stop_ids,
        )
        started = time.perf_counter()
        self._count("requests")
        generation, version = await server.generate(transcripts.tokens[slot, :at].tolist(), how)
        drawn = len(generation.tokens)
        kept = scanner.feed(generation.tokens) if scanner else None
        end = at + (drawn if kept is None else kept)
        transcripts.tokens[slot, at:end] = generation.tokens[: end - at]
        transcripts.logprobs[slot, at:end] = generation.logprobs[: end - at]
        transcripts.versions[slot, at:end] = version
        transcripts.loss_mask[slot, at:end] = True
        transcripts.lengths[slot] = end
        counters.policy_tokens += end - at
        counters.discarded_tokens += at + drawn - end
        counters.prefill_tokens += at
        counters.decode_dispatches += 1
        counters.decode_seconds += time.perf_counter() - started
        return self._reason(slot, end, limit, drew=end > at, matched=kept is not None), drawn

    def _reason(self, slot: int, end: int, limit: int, *, drew: bool, matched: bool) -> TurnReason:
        last = int(self.transcripts.tokens[slot, end - 1]) if drew else None
        if last == self._end_of_turn:
            return "end_of_turn"
        if matched:
            return "stop_string"
        if last in self._stop_ids:
            return "stop_id"
        if end < limit:
            return ""  # aborted, or stopped by something that only the server knows of: it goes on from there
        return "context" if end == self.context_tokens else "turn_limit"

    async def _await_retry(self, server: Server, trouble: Trouble, failures: int) -> None:
        self._count("retries")
        if isinstance(trouble, Unreachable):
            if server.is_up:
                server.down(trouble)  # its keeper looks what is there now
                self._log(f"{server.url} is away: {trouble}")
                if not any(other.is_up for other in self._servers):
                    self._any_up.clear()
            if failures == 1:
                return  # another one may serve it at once; if none does, it waits until one is back
        if isinstance(trouble, Overloaded):
            self._count("overloads")
            server.gate.overloaded(trouble.retry_after_seconds)
        await asyncio.sleep(max(trouble.retry_after_seconds, pause_seconds(self._config, failures)))

    def _failed(self, kind: str, detail: str) -> str:
        self._count("failed_requests")
        if self.counters.of_kind["failed_requests"] in (1, 10, 100, 1000):
            self._log(f"request failed ({self.counters.of_kind['failed_requests']:.0f} so far): {detail[:500]}")
        return kind

    def _turn_done(self, slot: int, task: asyncio.Task[None]) -> None:
        if self._turns.get(slot) is task:
            del self._turns[slot]
        if not task.cancelled() and task.exception() is not None:
            self._fatal = task.exception()
            self._wake.set()

    # -- figures -------------------------------------------------------------------------------

    def _count(self, name: str) -> None:
        self.counters.of_kind[name] += 1

    def _count_servers(self) -> None:
        gates = [server.gate for server in self._servers if server.is_up]
        self.counters.of_kind |= {
            "servers_up": len(gates),
            "request_limit": sum(int(gate.limit) for gate in gates),
            "requests_active": sum(gate.active for gate in gates),
            "requests_waiting": sum(gate.num_waiting for gate in gates),
        }


def _api_key(config: EngineConfig) -> str:
    if not config.api_key_variable:
        return ""
    key = os.environ.get(config.api_key_variable, "")
    if not key:
        raise ConfigError(
            "engine.api_key_variable",
            config.api_key_variable,
            "the name of a variable that is set",
            "Set it in the environment of the actors.",
        )
    return key


def _seed(key: np.ndarray, position: int) -> int:
    """63 bits that follow from both."""
    data = key.astype("<u4").tobytes() + position.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1

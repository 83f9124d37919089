"""The policy engine: slots that hold conversations, decoded together with the weights of a version.

A slot is free, parked (its environment has the word), in prefill (tokens to read before it may
speak) or decoding. Its KV cache stays while it is parked; what the environment answers is appended,
never read again from the start. A conversation that begins like another one copies its entries.

Weights change between dispatches. The cache of a slot belongs to one version: a slot that starts a
turn under other weights than its cache has reads its whole prefix again, in the same chunks as any
prefill. Policy `turn` lets a turn that has begun end with its weights, which stay resident until no
slot speaks with them; `immediate` sends speaking slots back to prefill at once; `finish` lets a
conversation keep the weights of its first turn. So no entry of an older version is read after a swap,
and every token carries the version that drew it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax
import numpy as np

from tunix_core.actor.dispatch import Params, device_parameters, engine_sizes, executables
from tunix_core.actor.planning import DecodeDispatch, decode_plan, fitting, prefill_shape
from tunix_core.actor.policy_engine import EngineCounters, Request, TurnEnd, TurnReason
from tunix_core.actor.prefixes import sharing
from tunix_core.actor.sampling import Kind
from tunix_core.actor.slots import DECODE, FREE, PARKED, PREFILL, Slots
from tunix_core.actor.stopping import Decode, StopScanner
from tunix_core.config import ActorConfig, ModelConfig
from tunix_core.errors import ConfigError
from tunix_core.models import decoder

_OVERHEAD_ROWS = {"cpu": 8.0}
_OVERHEAD_ROWS_ELSEWHERE = 256.0
"""What a dispatch costs besides its rows, in rows, see `planning`. On CPU measured; an accelerator is
bound by reading the weights, so up to hundreds of rows cost little more than one."""

_WASTED_SHARE = 24
"""A decode dispatch ends early once rows that have ended would take more than one in so many of its steps."""


class Engine:
    """N slots over one cache; a `PolicyEngine`.

    Args:
        model: shapes of the decoder.
        actor: slots, context, chunk and dispatch sizes, stop rules, swap policy.
        params: weights of `version`.
        end_of_turn: the id with which the policy ends a turn.
        decode: ids to text; stop strings need it.
        sampling: which requests it takes; training's take the temperature alone.
    """

    def __init__(
        self,
        model: ModelConfig,
        actor: ActorConfig,
        params: Params,
        version: int,
        *,
        end_of_turn: int,
        decode: Decode | None = None,
        sampling: Kind = "temperature",
    ) -> None:
        stop_ids = (end_of_turn, *actor.stop_ids)
        for token in stop_ids:
            if token >= model.vocab_size:
                raise ConfigError(
                    "actor.stop_ids", token, f"ids below {model.vocab_size}", "Name ids of the vocabulary."
                )
        self._actor = actor
        self._decode_text = decode
        self.context_tokens = actor.context_tokens
        self._end_of_turn = end_of_turn
        self._stop_ids = np.array(stop_ids, np.int32)
        self._sizes = engine_sizes(actor, stop_ids)
        self._executables = executables(model, self._sizes, sampling)
        self._cache = decoder.init_cache(model, actor.num_slots, self._sizes.contexts[-1])
        self._resident: dict[int, Params] = {version: device_parameters(params)}
        self._overhead = _OVERHEAD_ROWS.get(jax.default_backend(), _OVERHEAD_ROWS_ELSEWHERE)
        self.version = version
        self.counters = EngineCounters()
        self._slots = Slots(actor.num_slots, actor.context_tokens, sampling)
        self.transcripts = self._slots.transcripts

    # -- slots ---------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return int((self._slots.state == FREE).sum())

    @property
    def num_parked(self) -> int:
        return int((self._slots.state == PARKED).sum())

    @property
    def busy(self) -> bool:
        return bool((self._slots.state >= PREFILL).any())

    def acquire(self, request: Request) -> int:
        """See `PolicyEngine`.

        Raises:
            ConfigError: the engine is not compiled for such sampling, or cannot see stop strings.
        """
        if request.stop_strings and self._decode_text is None:
            raise ConfigError(
                "request.stop_strings",
                request.stop_strings,
                "none without a tokenizer",
                "Make the engine with `decode`.",
            )
        return self._slots.take(request)

    def release(self, slot: int) -> None:
        self._slots.give_back(slot)

    def room(self, slot: int) -> int:
        return self.context_tokens - int(self.transcripts.lengths[slot]) - 1

    def begin_turn(self, slot: int, ids: list[int], max_tokens: int | None = None) -> None:
        slots = self._slots
        assert slots.state[slot] == PARKED, "begin_turn on a slot that is not parked"
        assert 0 < len(ids) <= self.room(slot), "begin_turn without room"
        limit = self._actor.max_turn_tokens
        if max_tokens is not None:
            if max_tokens < 1:
                raise ConfigError("max_tokens", max_tokens, "at least 1", "A turn has at least one token.")
            limit = min(limit, max_tokens)
        slots.begin_turn(slot, ids, limit)
        if self._actor.swap_policy == "finish" and slots.pinned[slot] < 0:
            slots.pinned[slot] = self.version
        strings = (*self._actor.stop_strings, *slots.stop_strings[slot])
        if strings:
            assert self._decode_text is not None
            slots.scanners[slot] = StopScanner(self._decode_text, strings)

    # -- weights -------------------------------------------------------------------------------

    def can_swap(self) -> bool:
        """At most `max_resident_versions` sets of weights are in memory."""
        self._drop_unused()
        return len(self._resident) < self._actor.max_resident_versions

    def swap(self, weights: Params, version: int) -> None:
        """See `PolicyEngine`; cheapest with weights that `device_parameters` made."""
        assert self.can_swap(), "swap while older versions still speak"
        assert version > self.version, "versions only rise"
        started = time.perf_counter()
        self._resident[version] = device_parameters(weights)
        self.version = version
        if self._actor.swap_policy == "immediate":
            state = self._slots.state
            state[state == DECODE] = PREFILL
        self._drop_unused()
        self.counters.swaps += 1
        self.counters.swap_seconds += time.perf_counter() - started

    def _drop_unused(self) -> None:
        slots = self._slots
        speaking = set(slots.cache_version[slots.state == DECODE].tolist())
        kept = speaking | set(slots.pinned[slots.state != FREE].tolist())
        for version in [v for v in self._resident if v != self.version and v not in kept]:
            del self._resident[version]

    async def start(self) -> None:
        """Compiled and loaded when it is made."""

    async def close(self) -> None:
        """Holds nothing but memory."""

    # -- dispatches ----------------------------------------------------------------------------

    async def advance(self) -> list[TurnEnd]:
        return self.run_once()

    def run_once(self) -> list[TurnEnd]:
        """Read some of what waits to be read, then decode up to `decode_steps` tokens of most slots that speak."""
        ended: list[TurnEnd] = []
        for _ in range(self._actor.prefill_dispatches):
            ready = self._prepare()
            if len(ready) == 0:
                break
            ended += self._extend(ready)
        slots = self._slots
        speaking = np.flatnonzero(slots.state == DECODE)
        versions = slots.cache_version[speaking]
        for version in np.unique(versions).tolist():
            own = speaking[versions == version]
            slots.waits[own] += 1
            for dispatch in self._decode_plan(own):
                ended += self._decode(own[dispatch.rows], dispatch, version)
        return ended

    def _prepare(self) -> np.ndarray:
        """Slots of one version that have tokens to read, first come first; those that can copy them have done so."""
        slots = self._slots
        pending = slots.pending()
        if len(pending) == 0:
            return pending
        pinned = slots.pinned[pending]
        versions = np.where(pinned >= 0, pinned, self.version)
        other = pending[slots.cache_version[pending] != versions]
        self.counters.recomputed_tokens += int(slots.cached[other].sum())
        slots.cached[other] = 0
        slots.cache_version[pending] = versions
        waiting = self._share(pending) if self._actor.shared_prefix_tokens else set()
        # The first decode step reads the one token that is left of these.
        last = pending[slots.cached[pending] == self.transcripts.lengths[pending] - 1]
        slots.state[last] = DECODE
        self.counters.prefill_tokens += len(last)
        ready = np.array([s for s in pending.tolist() if s not in waiting and slots.state[s] == PREFILL], np.int32)
        return ready[slots.cache_version[ready] == slots.cache_version[ready[:1]]]

    def _share(self, pending: np.ndarray) -> set[int]:
        """Copy prefixes from other slots; which slots wait for one that is being read."""
        slots = self._slots
        found = sharing(
            pending.tolist(),
            tokens=self.transcripts.tokens,
            lengths=self.transcripts.lengths,
            cached=slots.cached,
            versions=slots.cache_version,
            min_tokens=self._actor.shared_prefix_tokens,
        )
        rows = self._sizes.copy_rows
        for start in range(0, len(found.targets), rows):
            part = slice(start, start + rows)
            num_tokens = np.array(found.num_tokens[part], np.int32)
            context = self._sizes.contexts[fitting(int(num_tokens.max()), self._sizes.contexts)]
            self._cache = self._executables.copy[context](
                None,
                self._cache,
                _padded(np.array(found.sources[part], np.int32), rows),
                _padded(np.array(found.targets[part], np.int32), rows, len(slots.state)),
            )
            slots.cached[found.targets[part]] = num_tokens
            self.counters.shared_tokens += int(num_tokens.sum())
        return found.waiting

    def _extend(self, ready: np.ndarray) -> list[TurnEnd]:
        """One `[R, C]` chunk for the first of `ready`; those it completes draw a token."""
        started = time.perf_counter()
        slots, transcripts = self._slots, self.transcripts
        remaining = transcripts.lengths[ready] - slots.cached[ready]
        num_rows, chunk = prefill_shape(remaining.tolist(), self._sizes.prefill_shapes, self._overhead)
        rows = ready[:num_rows]
        starts = slots.cached[rows]
        lengths = np.minimum(remaining[:num_rows], chunk)
        version = int(slots.cache_version[rows[0]])
        context = self._sizes.contexts[fitting(int(starts.max()) + chunk, self._sizes.contexts)]
        columns = np.minimum(starts[:, None] + np.arange(chunk, dtype=np.int32), self.context_tokens - 1)
        self._cache, drawn, logprobs = self._executables.extend[num_rows, chunk, context](
            self._resident[version],
            self._cache,
            _padded(rows, num_rows),
            _padded(transcripts.tokens[rows[:, None], columns], num_rows),
            _padded(starts, num_rows),
            _padded(lengths, num_rows),
            slots.draws(_padded(rows, num_rows, rows[0])),
        )
        slots.cached[rows] = starts + lengths
        complete = slots.cached[rows] == transcripts.lengths[rows]
        done = rows[complete]
        ended = self._append(
            done,
            np.asarray(drawn)[None, : len(rows)][:, complete],
            np.asarray(logprobs)[None, : len(rows)][:, complete],
            np.ones(len(done), np.int32),
            version,
        )
        self.counters.prefill_tokens += int(lengths.sum())
        self.counters.extend_dispatches += 1
        self.counters.extend_seconds += time.perf_counter() - started
        return ended

    def _decode_plan(self, own: np.ndarray) -> list[DecodeDispatch]:
        sizes = self._sizes
        # What a dispatch writes must fit as well as what it reads.
        needs = (self._slots.cached[own] + sizes.decode_steps).tolist()
        contexts = [fitting(need, sizes.contexts) for need in needs]
        return decode_plan(contexts, self._slots.waits[own].tolist(), sizes.decode_rows, self._overhead)

    def _decode(self, rows: np.ndarray, dispatch: DecodeDispatch, version: int) -> list[TurnEnd]:
        """Up to K tokens for each of the slots `rows`, at most A, all of which speak with `version`."""
        started = time.perf_counter()
        slots, transcripts, size = self._slots, self.transcripts, dispatch.num_rows
        slots.waits[rows] = 0
        lengths = transcripts.lengths[rows]
        self._cache, drawn, logprobs, counts, num_steps = self._executables.decode[
            size, self._sizes.contexts[dispatch.context]
        ](
            self._resident[version],
            self._cache,
            _padded(rows.astype(np.int32), size, len(slots.state)),
            _padded(transcripts.tokens[rows, lengths - 1], size),
            _padded(slots.cached[rows], size),
            _padded(slots.turn_limit[rows] - lengths, size),
            np.int32(size * self._sizes.decode_steps // _WASTED_SHARE),
            slots.draws(_padded(rows, size, rows[0])),
        )
        num_rows, before = len(rows), self.counters.policy_tokens
        ended = self._append(
            rows,
            np.asarray(drawn)[:, :num_rows],
            np.asarray(logprobs)[:, :num_rows],
            np.array(counts)[:num_rows],
            version,
        )
        self.counters.decode_dispatches += 1
        self.counters.decode_rows += size * int(num_steps)
        self.counters.decode_live_rows += self.counters.policy_tokens - before
        self.counters.decode_seconds += time.perf_counter() - started
        return ended

    def _append(
        self, rows: np.ndarray, drawn: np.ndarray, logprobs: np.ndarray, counts: np.ndarray, version: int
    ) -> list[TurnEnd]:
        """Store drawn tokens [K, A], `counts` [A] of them valid, and end the turns that are over."""
        if len(rows) == 0:
            return []
        slots, transcripts = self._slots, self.transcripts
        matched = self._stop_at_strings(rows, drawn, counts)
        lengths = transcripts.lengths[rows]
        step, row = np.nonzero(np.arange(len(drawn))[:, None] < counts)
        at = (rows[row], lengths[row] + step)
        transcripts.tokens[at] = drawn[step, row]
        transcripts.logprobs[at] = logprobs[step, row]
        transcripts.versions[at] = version
        transcripts.loss_mask[at] = True
        lengths = transcripts.lengths[rows] = lengths + counts
        slots.cached[rows] = lengths - 1
        self.counters.policy_tokens += int(counts.sum())
        last = transcripts.tokens[rows, lengths - 1]
        over = matched | np.isin(last, self._stop_ids) | (lengths >= slots.turn_limit[rows])
        slots.state[rows] = np.where(over, PARKED, DECODE)
        return [self._turn_end(int(rows[i]), int(last[i]), bool(matched[i])) for i in np.flatnonzero(over)]

    def _stop_at_strings(self, rows: np.ndarray, drawn: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """bool [A]: rows that a stop string ends; their `counts` are lowered to the token that completes it."""
        matched = np.zeros(len(rows), bool)
        for row, slot in enumerate(rows.tolist()):
            scanner = self._slots.scanners.get(slot)
            kept = scanner.feed(drawn[: counts[row], row].tolist()) if scanner else None
            if kept is not None:
                matched[row] = True
                self.counters.discarded_tokens += int(counts[row]) - kept
                counts[row] = kept
        return matched

    def _turn_end(self, slot: int, last: int, matched: bool) -> TurnEnd:
        end = int(self.transcripts.lengths[slot])
        self._slots.scanners.pop(slot, None)
        reason: TurnReason
        if last == self._end_of_turn:
            reason = "end_of_turn"
        elif matched:
            reason = "stop_string"
        elif last in self._stop_ids:
            reason = "stop_id"
        else:
            reason = "context" if end == self.context_tokens else "turn_limit"
        stopped = last == self._end_of_turn
        return TurnEnd(slot, int(self._slots.turn_start[slot]), end, stopped, reason=reason)


def _padded(rows: Sequence[int] | np.ndarray, num_rows: int, fill: float = 0) -> np.ndarray:
    """`rows` [r, …] with rows of `fill` appended up to `num_rows`."""
    values = np.asarray(rows)
    if len(values) == num_rows:
        return values
    out = np.full((num_rows, *values.shape[1:]), fill, values.dtype)
    out[: len(values)] = values
    return out

"""The policy engine: slots that hold conversations, decoded together with the weights of a version.

A slot is free, parked (its environment has the word), in prefill (tokens to read before it may
speak) or decoding. Its KV cache stays while it is parked; what the environment answers is appended,
never read again from the start.

Weights change between dispatches. The cache of a slot belongs to one version: a slot that starts a
turn under other weights than its cache has reads its whole prefix again, in the same chunks as any
prefill. Policy `turn` lets a turn that has begun end with its weights, which stay resident until no
slot speaks with them; `immediate` sends speaking slots back to prefill at once. So no entry of an
older version is read after a swap, and every token carries the version that drew it.
"""

from __future__ import annotations

import time

import numpy as np

from tunix_core.actor.dispatch import EngineSizes, Params, device_parameters, executables
from tunix_core.actor.policy_engine import NO_VERSION, EngineCounters, Request, Transcripts, TurnEnd
from tunix_core.config import ActorConfig, ModelConfig
from tunix_core.models import decoder

FREE, PARKED, PREFILL, DECODE = range(4)


class Engine:
    """N slots over one cache; a `PolicyEngine`.

    Args:
        model: shapes of the decoder.
        actor: slots, context, chunk and dispatch sizes, swap policy.
        params: weights of `version`.
        end_of_turn: the id with which the policy ends a turn.
        greedy: take the likeliest token (evaluation) instead of drawing one.
    """

    def __init__(
        self,
        model: ModelConfig,
        actor: ActorConfig,
        params: Params,
        version: int,
        *,
        end_of_turn: int,
        greedy: bool = False,
    ) -> None:
        num_slots, context = actor.num_slots, actor.context_tokens
        self._actor = actor
        self.context_tokens = context
        self._cache = decoder.init_cache(model, num_slots, context)
        self._resident: dict[int, Params] = {version: device_parameters(params)}
        self._decode_rows = min(actor.decode_rows, num_slots)
        sizes = EngineSizes(
            num_slots=num_slots,
            context_tokens=context,
            prefill_rows=actor.prefill_rows,
            prefill_tokens=actor.prefill_tokens,
            decode_rows=self._decode_rows,
            decode_steps=actor.decode_steps,
            end_of_turn=end_of_turn,
        )
        self._end_of_turn = end_of_turn
        self._executables = executables(model, sizes, greedy=greedy)
        self.version = version
        self.counters = EngineCounters()
        self.transcripts = Transcripts(num_slots, context)
        self._cached = np.zeros(num_slots, np.int32)
        """Leading tokens whose cache entries are valid under `_cache_version`."""
        self._cache_version = np.full(num_slots, NO_VERSION, np.int32)
        self._state = np.full(num_slots, FREE, np.int8)
        self._turn_start = np.zeros(num_slots, np.int32)
        self._turn_limit = np.zeros(num_slots, np.int32)
        self._keys = np.zeros((num_slots, 2), np.uint32)
        self._temperatures = np.ones(num_slots, np.float32)

    # -- slots ---------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return int((self._state == FREE).sum())

    @property
    def num_parked(self) -> int:
        return int((self._state == PARKED).sum())

    @property
    def busy(self) -> bool:
        return bool((self._state >= PREFILL).any())

    def acquire(self, request: Request) -> int:
        slot = int(np.argmax(self._state == FREE))
        assert self._state[slot] == FREE, "acquire without a free slot"
        self._state[slot] = PARKED
        self.transcripts.clear(slot)
        self._cached[slot] = 0
        self._cache_version[slot] = NO_VERSION
        self._keys[slot] = request.key
        self._temperatures[slot] = request.temperature
        return slot

    def release(self, slot: int) -> None:
        self._state[slot] = FREE

    def room(self, slot: int) -> int:
        return self.context_tokens - int(self.transcripts.lengths[slot]) - 1

    def begin_turn(self, slot: int, ids: list[int]) -> None:
        assert self._state[slot] == PARKED, "begin_turn on a slot that is not parked"
        assert 0 < len(ids) <= self.room(slot), "begin_turn without room"
        start = int(self.transcripts.lengths[slot])
        end = start + len(ids)
        self.transcripts.tokens[slot, start:end] = ids
        self.transcripts.lengths[slot] = self._turn_start[slot] = end
        self._turn_limit[slot] = min(end + self._actor.max_turn_tokens, self.context_tokens)
        self._state[slot] = PREFILL

    # -- weights -------------------------------------------------------------------------------

    def can_swap(self) -> bool:
        """At most two versions are resident."""
        self._drop_unused()
        return len(self._resident) == 1

    def swap(self, weights: Params, version: int) -> None:
        """See `PolicyEngine`; cheapest with weights that `device_parameters` made."""
        assert self.can_swap(), "swap while an older version still speaks"
        started = time.perf_counter()
        self._resident[version] = device_parameters(weights)
        self.version = version
        if self._actor.swap_policy == "immediate":
            self._state[self._state == DECODE] = PREFILL
        self._drop_unused()
        self.counters.swaps += 1
        self.counters.swap_seconds += time.perf_counter() - started

    def _drop_unused(self) -> None:
        speaking = set(self._cache_version[self._state == DECODE].tolist())
        for version in [v for v in self._resident if v != self.version and v not in speaking]:
            del self._resident[version]

    async def close(self) -> None:
        """Holds nothing but memory."""

    # -- dispatches ----------------------------------------------------------------------------

    async def advance(self) -> list[TurnEnd]:
        return self.run_once()

    def run_once(self) -> list[TurnEnd]:
        """Read all that waits to be read, then decode up to `decode_steps` tokens per slot."""
        ended: list[TurnEnd] = []
        while (self._state == PREFILL).any():
            ended += self._extend_chunk()
        speaking = np.flatnonzero(self._state == DECODE)
        for version in np.unique(self._cache_version[speaking]).tolist():
            slots = speaking[self._cache_version[speaking] == version]
            for start in range(0, len(slots), self._decode_rows):
                ended += self._decode(slots[start : start + self._decode_rows], version)
        return ended

    def _extend_chunk(self) -> list[TurnEnd]:
        """One `[R, C]` chunk for the first R slots in prefill; those it completes draw a token."""
        started = time.perf_counter()
        num_rows, chunk = self._actor.prefill_rows, self._actor.prefill_tokens
        slots = np.flatnonzero(self._state == PREFILL)[:num_rows]
        other = slots[self._cache_version[slots] != self.version]
        self.counters.recomputed_tokens += int(self._cached[other].sum())
        self._cached[other] = 0
        self._cache_version[other] = self.version

        starts = self._cached[slots]
        lengths = np.minimum(self.transcripts.lengths[slots] - starts, chunk)
        columns = np.minimum(starts[:, None] + np.arange(chunk, dtype=np.int32), self.context_tokens - 1)
        self._cache, drawn, logprobs = self._executables.extend(
            self._resident[self.version],
            self._cache,
            _padded(slots.astype(np.int32), num_rows),
            _padded(self.transcripts.tokens[slots[:, None], columns], num_rows),
            _padded(starts, num_rows),
            _padded(lengths, num_rows),
            _padded(self._keys[slots], num_rows),
            _padded(self._temperatures[slots], num_rows, 1.0),
        )
        self._cached[slots] = starts + lengths
        complete = self._cached[slots] == self.transcripts.lengths[slots]
        done = slots[complete]
        ended = self._append(
            done,
            np.asarray(drawn)[None, : len(slots)][:, complete],
            np.asarray(logprobs)[None, : len(slots)][:, complete],
            np.ones(len(done), np.int32),
            self.version,
        )
        self.counters.prefill_tokens += int(lengths.sum())
        self.counters.extend_dispatches += 1
        self.counters.extend_seconds += time.perf_counter() - started
        return ended

    def _decode(self, slots: np.ndarray, version: int) -> list[TurnEnd]:
        """Up to K tokens for each of `slots`, at most A, all of which speak with `version`."""
        started = time.perf_counter()
        rows = self._batch(slots)
        lengths = self.transcripts.lengths[rows]
        budgets = np.where(self._member(rows, slots), self._turn_limit[rows] - lengths, 0)
        # A row that only fills the batch writes behind its valid entries, where nothing is read.
        positions = np.minimum(self._cached[rows], self.context_tokens - 1)
        self._cache, drawn, logprobs, counts = self._executables.decode(
            self._resident[version],
            self._cache,
            rows,
            self.transcripts.tokens[rows, np.maximum(lengths - 1, 0)],
            positions,
            budgets.astype(np.int32),
            self._keys[rows],
            self._temperatures[rows],
        )
        live = np.flatnonzero(budgets > 0)
        ended = self._append(
            rows[live],
            np.asarray(drawn)[:, live],
            np.asarray(logprobs)[:, live],
            np.asarray(counts)[live],
            version,
        )
        self.counters.decode_dispatches += 1
        self.counters.decode_rows += len(rows)
        self.counters.decode_live_rows += len(slots)
        self.counters.decode_seconds += time.perf_counter() - started
        return ended

    def _batch(self, slots: np.ndarray) -> np.ndarray:
        """Row numbers int32 [A]: `slots`, filled up with others, or all slots in order."""
        num_slots, size = len(self._state), self._decode_rows
        if size == num_slots:
            return np.arange(num_slots, dtype=np.int32)
        others = np.setdiff1d(np.arange(num_slots, dtype=np.int32), slots, assume_unique=True)
        return np.concatenate([slots.astype(np.int32), others[: size - len(slots)]])

    def _member(self, rows: np.ndarray, slots: np.ndarray) -> np.ndarray:
        member = np.zeros(len(self._state), bool)
        member[slots] = True
        return member[rows]

    def _append(
        self, slots: np.ndarray, drawn: np.ndarray, logprobs: np.ndarray, counts: np.ndarray, version: int
    ) -> list[TurnEnd]:
        """Store drawn tokens [K, A], `counts` [A] of them valid, and end the turns that are over."""
        if len(slots) == 0:
            return []
        lengths = self.transcripts.lengths[slots]
        step, row = np.nonzero(np.arange(len(drawn))[:, None] < counts)
        at = (slots[row], lengths[row] + step)
        self.transcripts.tokens[at] = drawn[step, row]
        self.transcripts.logprobs[at] = logprobs[step, row]
        self.transcripts.versions[at] = version
        self.transcripts.loss_mask[at] = True
        lengths = self.transcripts.lengths[slots] = lengths + counts
        self._cached[slots] = lengths - 1
        self.counters.policy_tokens += int(counts.sum())
        stopped = self.transcripts.tokens[slots, lengths - 1] == self._end_of_turn
        over = stopped | (lengths >= self._turn_limit[slots])
        self._state[slots] = np.where(over, PARKED, DECODE)
        starts = self._turn_start[slots]
        return [TurnEnd(int(slots[i]), int(starts[i]), int(lengths[i]), bool(stopped[i])) for i in np.flatnonzero(over)]


def _padded(rows: np.ndarray, num_rows: int, fill: float = 0) -> np.ndarray:
    """`rows` [r, …] with rows of `fill` appended up to `num_rows`."""
    out = np.full((num_rows, *rows.shape[1:]), fill, rows.dtype)
    out[: len(rows)] = rows
    return out

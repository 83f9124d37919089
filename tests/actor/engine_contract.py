"""What every policy engine promises, as tests: `test_engine_contract.py` runs them against each kind.

Weights are named by their seed in `tests.actor.support`; log probabilities are compared with the packed
forward pass over the same tokens with the weights of the version that a token carries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import pytest

from tests.actor.support import ACTOR, expected_logprobs, weights
from tunix_core.actor.policy_engine import NO_VERSION, PolicyEngine, Request, TurnEnd
from tunix_core.actor.sampling import request_key
from tunix_core.errors import ConfigError
from tunix_core.tokenizer import ByteTokenizer

END = ByteTokenizer.END_OF_TURN
PROMPT = [ByteTokenizer.BOS, 65, 66, 67, 68, END]
REPLY = [48, 49, END]
TEMPERATURE = 0.8
SEEDS = {0: 0, 5: 1, 9: 2}
"""Version -> seed of its weights."""


class Kind(Protocol):
    """How the suite gets engines of one kind."""

    same_key_same_draws: bool
    """Whether the kind, as it is set up here, promises it."""

    def engine(self, **actor_fields: Any) -> PolicyEngine:
        """With the weights of version 0; not started."""
        ...

    def weights(self, version: int) -> Any:
        """As `swap` takes them."""
        ...

    async def amid_turns(self, engine: PolicyEngine) -> list[TurnEnd]:
        """Generate until some turns have a part of their tokens."""
        ...


class Run(NamedTuple):
    """A kind's engine, started, and the test's loop around it."""

    kind: Kind
    engine: PolicyEngine

    def acquire(self, *key: int | str) -> int:
        return self.engine.acquire(Request(key=request_key(*key), temperature=TEMPERATURE))

    async def finish(self) -> list[TurnEnd]:
        ended: list[TurnEnd] = []
        while self.engine.busy:
            ended += await self.engine.advance()
        return ended

    async def speak(self, slots: Sequence[int], ids: list[int]) -> list[TurnEnd]:
        for slot in slots:
            self.engine.begin_turn(slot, ids)
        return await self.finish()

    async def swap(self, version: int) -> list[TurnEnd]:
        """Until the version is the one that turns start with."""
        ended: list[TurnEnd] = []
        while not self.engine.can_swap():
            ended += await self.engine.advance()
        self.engine.swap(self.kind.weights(version), version)
        while self.engine.version != version:
            ended += await self.engine.advance()
        return ended

    def check(self, slot: int) -> set[int]:
        """The record of a slot is consistent, and each policy token's log probability is its version's; the versions."""
        found = self.engine.transcripts.conversation(slot)
        mask = found.loss_mask
        assert (found.versions[~mask] == NO_VERSION).all()
        assert (found.logprobs[~mask] == 0).all()
        versions = set(found.versions[mask].tolist())
        for version in versions:
            mine = mask & (found.versions == version)
            expected = expected_logprobs(weights(SEEDS[version]), found.tokens, TEMPERATURE)
            np.testing.assert_allclose(found.logprobs[mine], expected[mine], atol=2e-5)
        return versions


def contract(kind: Kind, test: Callable[[Run], Awaitable[None]], **actor_fields: Any) -> None:
    """Run one test of the suite in a loop of its own."""

    async def run() -> None:
        engine = kind.engine(**actor_fields)
        try:
            await engine.start()
            await test(Run(kind, engine))
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(run(), 240))


class EngineContract:
    """Subclasses give the fixture `kind`."""

    def test_turns_end_at_end_of_turn_or_at_their_limit(self, kind: Kind) -> None:
        async def test(run: Run) -> None:
            slots = [run.acquire("ends", i) for i in range(ACTOR.num_slots)]
            assert run.engine.num_free == 0
            assert run.engine.num_parked == len(slots)
            ended = await run.speak(slots, PROMPT)
            assert sorted(turn.slot for turn in ended) == slots
            assert {turn.stopped for turn in ended} == {True, False}
            for turn in ended:
                drawn = run.engine.transcripts.tokens[turn.slot, turn.start : turn.end]
                assert turn.failure == ""
                assert turn.start == len(PROMPT)
                assert turn.end == run.engine.transcripts.lengths[turn.slot]
                assert turn.stopped == (drawn[-1] == END)
                assert (drawn[:-1] != END).all()
                assert turn.stopped or len(drawn) == ACTOR.max_turn_tokens
                assert turn.reason == ("end_of_turn" if turn.stopped else "turn_limit")
                assert run.check(turn.slot) == {0}

        contract(kind, test)

    def test_a_conversation_grows_and_nothing_of_it_changes(self, kind: Kind) -> None:
        async def test(run: Run) -> None:
            slot = run.acquire("grows")
            said: list[int] = []
            for ids in (PROMPT, REPLY, REPLY):
                assert run.engine.room(slot) == run.engine.context_tokens - len(said) - 1
                (turn,) = await run.speak([slot], ids)
                found = run.engine.transcripts.conversation(slot)
                assert found.tokens[: len(said) + len(ids)].tolist() == said + ids
                assert not found.loss_mask[len(said) : turn.start].any()
                assert found.loss_mask[turn.start : turn.end].all()
                said = found.tokens.tolist()
                run.check(slot)

        contract(kind, test)

    def test_the_context_is_never_overrun(self, kind: Kind) -> None:
        async def test(run: Run) -> None:
            slot = run.acquire("full")
            with pytest.raises(AssertionError, match="room"):
                run.engine.begin_turn(slot, [65] * run.engine.context_tokens)
            (turn,) = await run.speak([slot], [ByteTokenizer.BOS] + [65] * (run.engine.room(slot) - 1))
            assert turn.end == run.engine.context_tokens
            assert turn.reason == "context"
            assert run.engine.room(slot) == -1
            run.check(slot)

        contract(kind, test)

    def test_a_turn_may_be_given_less_than_the_limit(self, kind: Kind) -> None:
        async def test(run: Run) -> None:
            slots = [run.acquire("less", i) for i in range(4)]
            for slot in slots:
                run.engine.begin_turn(slot, PROMPT, 2)
            for turn in await run.finish():
                assert turn.end - turn.start <= 2
                assert turn.stopped or turn.reason == "turn_limit"
            with pytest.raises(ConfigError):
                run.engine.begin_turn(slots[0], REPLY, 0)

        contract(kind, test)

    def test_other_ids_and_texts_end_a_turn_too(self, kind: Kind) -> None:
        """So many of both that each of them ends some of the turns."""
        stop_ids = tuple(range(0, 256, 5))
        strings = tuple(chr(i) for i in range(33, 127) if i not in stop_ids)

        def reason(token: int) -> str:
            if token == END:
                return "end_of_turn"
            if any(string in ByteTokenizer().decode([token]) for string in strings):
                return "stop_string"
            return "stop_id" if token in stop_ids else ""

        async def test(run: Run) -> None:
            slots = [run.acquire("stops", i) for i in range(ACTOR.num_slots)]
            ended = await run.speak(slots, PROMPT) + await run.speak(slots, REPLY)
            assert {"stop_id", "stop_string"} <= {turn.reason for turn in ended}
            for turn in ended:
                drawn = run.engine.transcripts.tokens[turn.slot, turn.start : turn.end].tolist()
                assert [reason(token) for token in drawn[:-1]] == [""] * (len(drawn) - 1)
                assert turn.reason == reason(drawn[-1]) or (turn.reason == "turn_limit" and not reason(drawn[-1]))
                assert turn.stopped == (turn.reason == "end_of_turn")
            for slot in slots:
                assert run.check(slot) == {0}

        contract(kind, test, stop_ids=stop_ids, stop_strings=strings)

    def test_draws_follow_from_the_key(self, kind: Kind) -> None:
        async def test(run: Run) -> None:
            drawn = []
            for others in (0, 3):
                slots = [run.acquire("same"), run.acquire("other"), *(run.acquire("crowd", i) for i in range(others))]
                await run.speak(slots, PROMPT)
                await run.speak(slots, REPLY)
                drawn.append([run.engine.transcripts.conversation(slot).tokens.tolist() for slot in slots[:2]])
                for slot in slots:
                    run.engine.release(slot)
            assert drawn[0][0] != drawn[0][1], "members of a group must not be copies"
            assert (drawn[0] == drawn[1]) or not kind.same_key_same_draws

        contract(kind, test)

    def test_parked_conversations_stay_as_they_are(self, kind: Kind) -> None:
        async def test(run: Run) -> None:
            slots = [run.acquire("parked", i) for i in range(6)]
            await run.speak(slots, PROMPT)
            before = [run.engine.transcripts.conversation(slot).tokens.tolist() for slot in slots[:3]]
            await run.speak(slots[3:], REPLY)
            assert [run.engine.transcripts.conversation(slot).tokens.tolist() for slot in slots[:3]] == before
            await run.speak(slots[:3], REPLY)
            for slot in slots:
                assert run.check(slot) == {0}

        contract(kind, test)

    def test_a_slot_can_be_released_in_any_state(self, kind: Kind) -> None:
        async def test(run: Run) -> None:
            engine = run.engine
            engine.release(run.acquire("parked"))
            speaking = run.acquire("speaking")
            engine.begin_turn(speaking, PROMPT)
            await engine.advance()
            engine.release(speaking)
            undelivered = run.acquire("undelivered")
            engine.begin_turn(undelivered, PROMPT)
            await asyncio.sleep(0.1)  # a turn may end without being handed out
            engine.release(undelivered)
            assert engine.num_free == ACTOR.num_slots
            assert await run.finish() == []
            slots = [run.acquire("again", i) for i in range(ACTOR.num_slots)]
            ended = await run.speak(slots, PROMPT)
            assert sorted(turn.slot for turn in ended) == sorted(slots)
            for slot in slots:
                assert run.check(slot) == {0}

        contract(kind, test)

    def test_busy_says_whether_a_turn_is_under_way(self, kind: Kind) -> None:
        async def test(run: Run) -> None:
            slot = run.acquire("busy")
            assert not run.engine.busy
            assert await run.engine.advance() == []
            run.engine.begin_turn(slot, PROMPT)
            assert run.engine.busy
            assert run.engine.num_parked == 0
            assert len(await run.finish()) == 1
            assert run.engine.num_parked == 1
            with pytest.raises(AssertionError, match="parked"):
                run.engine.begin_turn((slot + 1) % ACTOR.num_slots, PROMPT)

        contract(kind, test)

    def test_new_weights_speak_from_the_next_turn_on(self, kind: Kind) -> None:
        async def test(run: Run) -> None:
            slots = [run.acquire("swapped", i) for i in range(4)]
            await run.speak(slots, PROMPT)
            for version in (5, 9):
                await run.swap(version)
                await run.speak(slots, REPLY)
                for slot in slots:
                    found = run.engine.transcripts.conversation(slot)
                    assert found.versions[-1] == version
            assert {version for slot in slots for version in run.check(slot)} == {0, 5, 9}
            assert run.engine.counters.swaps == 2

        contract(kind, test)

    @pytest.mark.parametrize("policy", ["turn", "immediate"])
    def test_every_token_is_of_its_version_when_weights_change_under_turns(self, kind: Kind, policy: str) -> None:
        async def test(run: Run) -> None:
            slots = [run.acquire(policy, i) for i in range(ACTOR.num_slots - 1)]
            for slot in slots:
                run.engine.begin_turn(slot, PROMPT)
            ended = await kind.amid_turns(run.engine)
            ended += await run.swap(5)
            late = run.acquire("late")
            run.engine.begin_turn(late, PROMPT)
            ended += await run.finish()
            assert sorted(turn.slot for turn in ended) == sorted([*slots, late])
            assert all(not turn.failure for turn in ended)
            assert run.check(late) == {5}
            found = [run.check(slot) for slot in slots]
            assert ({0, 5} in found) if policy == "immediate" else (found == [{0}] * len(slots))

        contract(kind, test, swap_policy=policy)

    def test_a_started_engine_can_be_closed_amid_turns(self, kind: Kind) -> None:
        async def test(run: Run) -> None:
            for i in range(3):
                run.engine.begin_turn(run.acquire("closed", i), PROMPT)
            await run.engine.advance()

        contract(kind, test)

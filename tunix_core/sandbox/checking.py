"""A submission and its tests, in two sandboxes, and what passes between them.

The tests ask (call this, read that), the submission answers with plain values, exceptions or handles;
this process passes bounded frames on and notes the outcomes, which come from the tests' sandbox alone.

So the submission's process never holds a test, an expected value or a descriptor that a verdict goes
through. It can end itself, print, patch what it likes, or answer nonsense: a test that depends on it
fails. What it cannot be kept from is answering rightly for the arguments that it is asked about, by
whatever means: tests with few arguments can be answered from a table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from tunix_core.sandbox.inside import wire
from tunix_core.sandbox.limits import SandboxLimits
from tunix_core.sandbox.results import SandboxResult, TestOutcome, Verdict
from tunix_core.sandbox.slot import Call, Channel

_NOT_REACHED = "the tests ended before this one"


class Exchange:
    """Of one check."""

    def __init__(self, source: str, tests: Mapping[str, str], setup: str, limits: SandboxLimits) -> None:
        self._names = list(tests)
        self._outcomes: dict[str, TestOutcome] = {}
        self._submission: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        work = wire.to_json({"setup": setup, "tests": list(tests.values())}).decode()
        self.submission = Call(role="submission", source=source, limits=limits, talk=self._hold)
        self.checker = Call(role="checker", source=work, limits=limits, talk=self._relay)

    async def _hold(self, channel: Channel) -> None:
        """Lend the submission's channel to the relay until the tests are over."""
        self._submission.set_result(channel)
        await self._over.wait()

    async def _relay(self, checker: Channel) -> None:
        try:
            submission = await self._submission
            await checker.send(await _answer(submission))
            while True:
                match wire.from_json(await checker.receive()):
                    case {"ask": question}:
                        await submission.send(wire.to_json(question))
                        await checker.send(await _answer(submission))
                    case {"test": int(number), "passed": bool(passed), "message": str(message)}:
                        if 0 <= number < len(self._names):
                            self._outcomes.setdefault(self._names[number], TestOutcome(passed=passed, message=message))
                    case _:
                        return
        except (EOFError, wire.MalformedMessage):
            return
        finally:
            self.end()

    def end(self) -> None:
        """The tests are over, or will never be."""
        self._over.set()

    def verdict(self, submission: SandboxResult, checker: SandboxResult) -> Verdict:
        missing = TestOutcome(passed=False, message=_NOT_REACHED)
        tests = {name: self._outcomes.get(name, missing) for name in self._names}
        return Verdict(tests=tests, submission=submission, checker=checker)


async def _answer(submission: Channel) -> bytes:
    """The next answer, marked by us as one; a letter that says there is none."""
    try:
        return b"A" + await submission.receive(wire.MAX_FRAME_BYTES)
    except (EOFError, wire.MalformedMessage):
        return b"G"

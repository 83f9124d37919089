"""Requests to a store: repeated with growing pauses where the fault may pass, and counted by verb and outcome."""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

from tunix_core.errors import CorruptObject, ObjectExists, ObjectMissing, StoreError, VersionConflict

Outcome = Literal["ok", "missing", "refused", "throttled", "failed", "broken", "corrupt", "denied"]
"""Of one request: `refused` a condition that does not hold, `throttled` a 429, `failed` a fault of the server, `broken` a
time-out or a lost connection, `corrupt` bytes that are not those of their checksum, `denied` what no repetition changes."""

_T = TypeVar("_T")
_Method = TypeVar("_Method", bound=Callable[..., Any])


class RequestCounts:
    """How many requests a store has sent, by verb and outcome; any thread may add. A verb that lists three pages or is
    tried three times counts three."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: collections.Counter[tuple[str, Outcome]] = collections.Counter()

    def add(self, verb: str, outcome: Outcome) -> None:
        with self._lock:
            self._counts[verb, outcome] += 1

    def total(self) -> collections.Counter[tuple[str, Outcome]]:
        """A copy of all so far."""
        with self._lock:
            return self._counts.copy()


class RequestMeter:
    """Turns a store's counts into columns of a metrics row: what was sent since the row before. One per row's writer."""

    def __init__(self, counts: RequestCounts) -> None:
        self._counts = counts
        self._seen: collections.Counter[tuple[str, Outcome]] = counts.total()

    def columns(self) -> dict[str, int]:
        """`store_requests`, `store_retries` (those that had to be sent again) and `store_<verb>_<outcome>` of what came."""
        total = self._counts.total()
        new = total - self._seen
        self._seen = total
        again = sum(
            count for (_, outcome), count in new.items() if outcome in ("throttled", "failed", "broken", "corrupt")
        )
        return {
            "store_requests": sum(new.values()),
            "store_retries": again,
            **{f"store_{verb}_{outcome}": count for (verb, outcome), count in sorted(new.items())},
        }


class _Counting(Protocol):
    counts: RequestCounts


def counted(method: _Method) -> _Method:
    """A verb of a store without a network, where a call is a request."""

    @functools.wraps(method)
    def call(self: _Counting, *arguments: Any, **options: Any) -> Any:
        try:
            result = method(self, *arguments, **options)
        except ObjectMissing:
            self.counts.add(method.__name__, "missing")
            raise
        except (ObjectExists, VersionConflict):
            self.counts.add(method.__name__, "refused")
            raise
        except StoreError:
            self.counts.add(method.__name__, "failed")
            raise
        self.counts.add(method.__name__, "ok")
        return result

    return call  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backoff:
    """How long a request is tried: pauses that double, each drawn from its upper half, so that many do not return at once."""

    num_attempts: int = 10
    first_seconds: float = 0.1
    max_seconds: float = 16.0
    total_seconds: float = 180.0
    """After this long no attempt begins."""

    def pause(self, attempt: int, at_least: float = 0.0) -> float:
        """Before attempt `attempt + 1`; a server may ask for more, up to `max_seconds`."""
        drawn = random.uniform(0.5, 1.0) * min(self.max_seconds, self.first_seconds * 2**attempt)
        return max(drawn, min(at_least, self.max_seconds))


class Transient(Exception):
    """One attempt failed in a way that may pass."""

    def __init__(self, outcome: Outcome, reason: str, *, retry_after_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.retry_after_seconds = retry_after_seconds


def try_until_done(attempt: Callable[[], _T], backoff: Backoff, *, what: str) -> _T:
    """`attempt()`, again after each Transient.

    Raises:
        CorruptObject: the last one failed for what was received again and again.
        StoreError: the last one failed.
    """
    started = time.monotonic()
    number = 0
    while True:
        try:
            return attempt()
        except Transient as error:
            number += 1
            if number >= backoff.num_attempts or time.monotonic() - started > backoff.total_seconds:
                kind = CorruptObject if error.outcome == "corrupt" else StoreError
                raise kind(f"{what}: {error} ({number} attempts)") from error
            time.sleep(backoff.pause(number - 1, error.retry_after_seconds))


class Lineage(tuple[str, ...]):
    """Who wrote an object, newest last: nonces of its last writes, kept in its metadata.

    A conditional write that is refused after a lost answer finds itself here, also when others have replaced what it
    wrote since. An unconditional write, and a deletion, begin anew.
    """

    LENGTH = 64
    """So many writes can come between an attempt and its repetition; S3 allows 2 KB of metadata."""

    @classmethod
    def parse(cls, text: str | None) -> Lineage:
        return cls(text.split(",")) if text else cls()

    def next(self) -> Lineage:
        """With a new writer."""
        return Lineage((*self[-self.LENGTH + 1 :], secrets.token_hex(8)))

    def includes(self, other: Lineage) -> bool:
        """Whether the write that `other` ends with is among these."""
        return other[-1] in self

    def __str__(self) -> str:
        return ",".join(self)


def status_fault(status: int, reason: str, *, retry_after: str | None) -> Transient | None:
    """What an HTTP status says about trying again; None where that is no use."""
    if status == 429 or status == 408 or status >= 500:
        seconds = float(retry_after) if retry_after and retry_after.isdigit() else 0.0
        return Transient("throttled" if status == 429 else "failed", reason, retry_after_seconds=seconds)
    return None

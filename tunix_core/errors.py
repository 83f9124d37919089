"""The one exception tree. Each leaf says whether a retry can help and which exit code it maps to.

Exit codes are what Airflow's retry policy sees (see `EXIT_CODES`): a retryable failure is worth
a new attempt from the last checkpoint, a fatal one needs a person.
"""

from __future__ import annotations

import sys

EXIT_SUCCESS = 0
EXIT_UNEXPECTED = 1
EXIT_CONFIG = 64
EXIT_DATA = 65
EXIT_ENGINE = 69
EXIT_FENCED = 70
EXIT_STORE = 74
EXIT_DIVERGED = 76
EXIT_INTERRUPTED = 75
EXIT_PEER_LOST = 77


class TunixError(Exception):
    """Base of every error this project raises on purpose."""

    retryable: bool = False
    exit_code: int = EXIT_UNEXPECTED


def report_error(error: TunixError) -> int:
    """Say on stderr what went wrong; returns the exit code."""
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return error.exit_code


class ConfigError(TunixError, ValueError):
    """A value that a person set is not acceptable."""

    exit_code = EXIT_CONFIG

    def __init__(self, field: str, received: object, accepted: str, remedy: str) -> None:
        super().__init__(f"{field}: received {received!r}, accepted {accepted}. {remedy}")
        self.field = field
        self.received = received
        self.accepted = accepted
        self.remedy = remedy


class DataError(TunixError, ValueError):
    """An object in the store is not what its name promises."""

    exit_code = EXIT_DATA


class CorruptObject(DataError):
    """An object's bytes disagree with its schema or checksum."""


class StoreError(TunixError):
    """The object store refused or failed an operation."""

    retryable = True
    exit_code = EXIT_STORE


class ObjectMissing(StoreError, KeyError):
    """No object under that key."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0]) if self.args else ""


class ObjectExists(StoreError):
    """A create-only write lost: the key is taken."""


class VersionConflict(StoreError):
    """A compare-and-swap lost: the object changed since it was read."""


class Fenced(TunixError):
    """Another incarnation owns what this process was about to write; this one must exit."""

    retryable = True
    exit_code = EXIT_FENCED


class Diverged(TunixError):
    """Training produced non-finite updates more often in a row than the configuration allows."""

    exit_code = EXIT_DIVERGED


class CompilationFailed(TunixError):
    """A compiler gave neither an executable nor a figure of memory."""


class Interrupted(TunixError):
    """A stop was asked for before the work was done."""

    retryable = True
    exit_code = EXIT_INTERRUPTED


class PeerLost(TunixError):
    """Another host of the same learner is gone; all of them start again together from the last checkpoint."""

    retryable = True
    exit_code = EXIT_PEER_LOST


class EngineUnavailable(TunixError):
    """No server that generates has answered for longer than the configuration allows."""

    retryable = True
    exit_code = EXIT_ENGINE


class EnvironmentFailure(TunixError):
    """An environment raised, crashed or ran past its deadline; costs one episode, never the run."""

    retryable = True


def _leaves(root: type[TunixError]) -> list[type[TunixError]]:
    found = [root]
    for child in root.__subclasses__():
        found.extend(_leaves(child))
    return found


def retryable_exit_codes() -> frozenset[int]:
    """Exit codes after which a new attempt may succeed (unexpected ones and signals included)."""
    codes = {cls.exit_code for cls in _leaves(TunixError) if cls.retryable}
    fatal = {cls.exit_code for cls in _leaves(TunixError) if not cls.retryable}
    return frozenset((codes - fatal) | {EXIT_UNEXPECTED})


def is_retryable(exit_code: int | None) -> bool:
    """Whether a process that ended so is worth another attempt; None means it vanished."""
    return exit_code is None or exit_code < 0 or exit_code > 128 or exit_code in retryable_exit_codes()

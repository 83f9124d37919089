"""Broken and hostile shards through everything the learner does with one: `make fuzz SECONDS=600 SEED=0`.

A case is a kind of `mutations.KINDS` and a number; it follows from the seed alone. A process of its own judges them, so that
a crash is a result like any other, and is begun anew behind the case that ended it. A case fails that raises anything but
`CorruptObject`, takes more memory than the limits promise, hangs or crashes; its bytes are kept.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import math
import random
import resource
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.fuzz.mutations import KINDS
from tests.support.trajectories import make_group
from tunix_core.data.buffer import ReplayBuffer
from tunix_core.data.rows import from_shard
from tunix_core.errors import CorruptObject
from tunix_core.storage.shard_checks import ShardLimits
from tunix_core.storage.shards import decode, encode
from tunix_core.storage.store import to_json

VOCAB_SIZE = 272
LIMITS = ShardLimits(max_decoded_bytes=2**26)
MAX_MEBIBYTES = 3 * LIMITS.max_decoded_bytes / 2**20 + 192
"""Decoded values, a copy of them and a page; and what Parquet makes of a footer of the largest size."""
HANG_SECONDS = 120.0
_ADDRESS_SPACE = 16 * 2**30
_OLDER = Path(__file__).parents[1] / "storage" / "data" / "schema-1.parquet"


def make_case(seed: int, kind: str, number: int) -> bytes:
    """The bytes of a case; every fourth is made from a file of schema version 1, which has no digest."""
    return KINDS[kind](random.Random(f"{seed}/{kind}/{number}"), _base(older=number % 4 == 3))


@functools.cache
def _base(*, older: bool) -> bytes:
    return _OLDER.read_bytes() if older else encode(make_group(0) + make_group(1))


def judge(data: bytes) -> str:
    """What the learner does with a shard. Raises whatever it should not."""
    try:
        rows = decode(data, vocab_size=VOCAB_SIZE, limits=LIMITS)
    except CorruptObject as error:
        return "refused" if len(str(error)) <= 500 else "a reason of more than 500 characters"
    buffer = ReplayBuffer(
        window_tokens=64,
        max_staleness=4,
        buffer_bytes=2**20,
        order="oldest_first",
        filter_zero_signal=False,
        group_advantages=lambda found, members: found.rewards[members],
    )
    buffer.advance(10)
    from_shard("shard", rows, incarnation="inc0", with_turns=True)
    refused = buffer.add(from_shard("shard", rows, incarnation="inc0"))
    to_json({str(row): reason for row, reason in refused.items()})
    for row in range(rows.num_rows):
        if row not in rows.faults:
            rows.trajectory(row)
    return "rows refused" if refused else "read"


# --- the process that judges -----------------------------------------------------------------------


def peak_mebibytes() -> float:
    """Of this process; `getrusage` would begin with that of the one that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def _forget_peak() -> None:
    with contextlib.suppress(OSError):  # then the peak only rises, and what rises is the case's
        Path("/proc/self/clear_refs").write_text("5")


def work(seed: int, first: int, kinds: Sequence[str], last: float) -> None:
    """Judge case after case, round by round; a line before each and one after it."""
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    number = first
    while number < last:
        kind = kinds[number % len(kinds)]
        data = make_case(seed, kind, number // len(kinds))
        print(f"begin {number}", flush=True)
        _forget_peak()
        before = peak_mebibytes()
        try:
            outcome = judge(data)
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"[:300].replace("\n", " ")
        print(f"end {number} {peak_mebibytes() - before:.0f} {outcome}", flush=True)
        number += 1


# --- the one that watches -------------------------------------------------------------------------


@dataclasses.dataclass
class Report:
    """What was tried."""

    outcomes: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    peaks: dict[str, float] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)

    def to_text(self) -> str:
        columns = sorted({outcome for _, outcome in self.outcomes})
        lines = [f"{'kind':<28}" + "".join(f"{name:>14}" for name in columns) + f"{'peak MiB':>10}"]
        for kind in sorted({kind for kind, _ in self.outcomes}):
            counts = "".join(f"{self.outcomes[kind, name]:>14}" for name in columns)
            lines.append(f"{kind:<28}{counts}{self.peaks.get(kind, 0):>10.0f}")
        totals = "".join(f"{sum(n for (_, o), n in self.outcomes.items() if o == name):>14}" for name in columns)
        return "\n".join([*lines, f"{'all':<28}{totals}{max(self.peaks.values(), default=0):>10.0f}", *self.failures])


def fuzz(
    *,
    seed: int,
    seconds: float = math.inf,
    rounds: float = math.inf,
    kinds: Sequence[str] = tuple(KINDS),
    keep: Path | None = None,
    worker: Sequence[str] = (sys.executable, "-m", "tests.fuzz.shards"),
) -> Report:
    """Try until the time is over or each kind had its rounds.

    Args:
        keep: folder for the bytes of cases that failed.
        worker: judges; for tests of this module.
    """
    report, number, deadline = Report(), 0, time.monotonic() + seconds
    last = rounds * len(kinds)
    while number < last and time.monotonic() < deadline:
        own = [*worker, "--work", str(number), "--seed", str(seed), "--kinds", *kinds, "--last", str(last)]
        with subprocess.Popen(own, stdout=subprocess.PIPE, bufsize=0) as process:
            begun = number
            try:
                for line in _lines(process, deadline):
                    if not line:
                        _fail(report, seed, kinds, begun, f"hangs for {HANG_SECONDS:.0f} s", keep)
                        number = begun + 1
                        break
                    word, at, *rest = line.split(maxsplit=3)
                    begun = int(at)
                    if word == "end":
                        number = begun + 1
                        _note(report, seed, kinds, begun, float(rest[0]), rest[1].strip(), keep)
            finally:
                ended = process.poll()
                process.kill()
        if ended is not None and ended < 0:
            _fail(report, seed, kinds, begun, f"ended its process by signal {-ended}", keep)
            number = begun + 1
        elif ended:
            raise RuntimeError(f"the fuzzer's own process ended with {ended} at {begun}")
    return report


def _lines(process: subprocess.Popen[bytes], deadline: float) -> Iterator[str]:
    """What the worker says until its end or the deadline; an empty line where it is silent for too long."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if not selector.select(HANG_SECONDS):
                yield ""
            line = process.stdout.readline().decode()
            if not line:
                process.wait()
                return
            yield line


def _note(
    report: Report, seed: int, kinds: Sequence[str], number: int, mebibytes: float, outcome: str, keep: Path | None
) -> None:
    kind = kinds[number % len(kinds)]
    report.peaks[kind] = max(report.peaks.get(kind, 0.0), mebibytes)
    if outcome not in ("refused", "rows refused", "read"):
        _fail(report, seed, kinds, number, outcome, keep)
    elif mebibytes > MAX_MEBIBYTES:
        _fail(report, seed, kinds, number, f"took {mebibytes:.0f} MiB, accepted {MAX_MEBIBYTES:.0f}", keep)
    else:
        report.outcomes[kind, outcome] += 1


def _fail(report: Report, seed: int, kinds: Sequence[str], number: int, why: str, keep: Path | None) -> None:
    kind = kinds[number % len(kinds)]
    report.outcomes[kind, "FAILED"] += 1
    report.failures.append(f"FAILED seed {seed} {kind} {number // len(kinds)}: {why}")
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        data = make_case(seed, kind, number // len(kinds))
        (keep / f"{seed}-{kind}-{number // len(kinds)}.parquet").write_bytes(data)


def main() -> int:
    parser = argparse.ArgumentParser(description="Broken and hostile shards through the learner's reading.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("reports/fuzz"), help="folder for cases that failed")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--last", type=float, default=math.inf, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work is not None:
        work(args.seed, args.work, args.kinds, args.last)
        return 0
    report = fuzz(seed=args.seed, seconds=args.seconds, kinds=args.kinds, keep=args.keep)
    print(report.to_text())
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())

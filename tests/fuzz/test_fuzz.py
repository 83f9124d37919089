"""A short part of `make fuzz`, and that it would say so if something were wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.mutations import KINDS
from tests.fuzz.shards import fuzz, make_case


def test_hostile_shards_neither_crash_nor_take_memory(tmp_path: Path) -> None:
    report = fuzz(seed=0, rounds=3, keep=tmp_path)
    assert report.failures == []
    assert sum(report.outcomes.values()) == 3 * len(KINDS)
    assert {outcome for _, outcome in report.outcomes} == {"read", "refused", "rows refused"}
    assert list(tmp_path.iterdir()) == []


_SAYS = """
import os, sys
first = int(sys.argv[sys.argv.index("--work") + 1])
print("begin", first, flush=True)
"""


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        ("os.kill(os.getpid(), 11)", "ended its process by signal 11"),
        ("print('end', first, 4000, 'refused', flush=True)", "took 4000 MiB"),
        ("print('end', first, 0, 'KeyError: x', flush=True)", "KeyError: x"),
    ],
)
def test_what_should_not_happen_is_a_failure_and_is_kept(then: str, reason: str, tmp_path: Path) -> None:
    worker = [sys.executable, "-c", _SAYS + then]
    report = fuzz(seed=7, rounds=1, kinds=("truncated", "garbage"), keep=tmp_path / "kept", worker=worker)
    assert [line.split(": ")[0] for line in report.failures] == ["FAILED seed 7 truncated 0", "FAILED seed 7 garbage 0"]
    assert all(reason in line for line in report.failures)
    assert report.failures[0] in report.to_text()
    assert (tmp_path / "kept" / "7-truncated-0.parquet").read_bytes() == make_case(7, "truncated", 0)


def test_a_fault_of_the_fuzzer_itself_is_no_result() -> None:
    with pytest.raises(RuntimeError, match="ended with 3"):
        fuzz(seed=0, rounds=1, kinds=("garbage",), worker=[sys.executable, "-c", _SAYS + "sys.exit(3)"])


_BOMB = """
import random
from tests.fuzz import mutations
from tests.fuzz.parquet_parts import Parts
from tests.fuzz.shards import peak_mebibytes as peak
from tests.support.trajectories import make_group
from tunix_core.errors import CorruptObject
from tunix_core.storage.shard_checks import ShardLimits
from tunix_core.storage.shards import decode, encode

data = encode(make_group(0))
decode(data)
parts = Parts.of(data)
bomb = mutations.long_row(random.Random(0), parts, True, 2**24)
before = peak()
try:
    decode(bomb, limits=ShardLimits(max_decoded_bytes=2**24))
except CorruptObject as error:
    print(error)
judged = peak()
decode(bomb)
print(len(bomb), judged - before, peak() - judged)
"""


def test_a_bomb_takes_no_memory() -> None:
    """Where it is let through it does: so it would have."""
    out = subprocess.run([sys.executable, "-c", _BOMB], capture_output=True, text=True, check=True).stdout
    refusal, figures = out.strip().splitlines()
    assert "decoded size" in refusal
    size, refused, let_through = map(float, figures.split())
    assert size < 100_000
    assert refused < 16
    assert let_through > 64

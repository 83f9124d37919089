"""What a run really did, computed again from its step records and shards alone.

The learner counts staleness, tokens and rewards while it runs; here the same figures come from the
immutable objects, by other code, so that a report does not repeat what it is told. Staleness of a
trajectory is the clock before the consuming step minus the oldest version among its policy tokens.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tunix_core.errors import CorruptObject
from tunix_core.evaluation.trajectories import successes
from tunix_core.storage.shard_archive import ShardArchive
from tunix_core.storage.shards import ShardRows
from tunix_core.storage.step_records import read_steps
from tunix_core.storage.store import ObjectStore
from tunix_core.types import LEDGER_CLASSES

_SHARDS_AT_A_TIME = 64


class StepAudit(NamedTuple):
    """One step, from the rows that its record names."""

    clock: int
    """After the step; the consuming clock is one less."""
    num_trajectories: int
    num_tokens: int
    mean_reward: float
    success_share: float
    mean_staleness: float
    max_staleness: int
    newest_created_at: float
    """When the batch's last trajectory was written, seconds since the epoch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunAudit:
    """The figures, and everything that should not be."""

    steps: Sequence[StepAudit]
    staleness: Mapping[int, int]
    """Staleness -> trajectories consumed at it."""
    staleness_violations: int
    """Trajectories consumed above the bound."""
    consumed_twice: Sequence[str]
    """Ids of trajectories in more steps than the run's `max_reuse`, or twice in one."""
    policy_versions: Sequence[int]
    """Versions that generated policy tokens, over all shards."""
    consumed_tokens: int
    """Of trajectories that steps trained on, without what they were allowed to use again."""
    reused_tokens: int
    """… and what they trained on once more."""
    written_tokens: int
    """In all readable shards, environment tokens included; those nobody read any more among them."""
    generated_tokens: int
    """Policy tokens in all readable shards."""
    written_trajectories: int
    unreadable: Mapping[str, str]
    """Shard -> why."""

    @property
    def max_staleness_seen(self) -> int:
        return max(self.staleness, default=0)


class _Row(NamedTuple):
    trajectory_id: str
    num_tokens: int
    version_min: int
    reward: float
    success: float
    created_at: float


@dataclasses.dataclass
class _Totals:
    written_tokens: int = 0
    generated_tokens: int = 0
    written_trajectories: int = 0
    versions: set[int] = dataclasses.field(default_factory=set)
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)


def audit_run(store: ObjectStore, *, max_staleness: int, max_reuse: int = 1) -> RunAudit:
    """Read every step record and every shard once.

    Args:
        store: of the run; it may still go on.
        max_staleness: the bound that no consumed trajectory may exceed.
        max_reuse: steps that may train on one trajectory.

    Raises:
        CorruptObject: a step consumed a row that is not there.
    """
    # records before shards: what a record names has been written before it
    records = read_steps(store, 0)
    wanted = collections.defaultdict(list)
    for record in records:
        for shard, row in _references(record):
            wanted[shard].append(row)
    totals, rows = _read_shards(store, wanted)
    steps, staleness, uses = [], collections.Counter[int](), collections.Counter[str]()
    twice, reused_tokens = set[str](), 0
    for record in records:
        consumed = [_consumed(rows, totals, record, shard, row) for shard, row in _references(record)]
        steps.append(_audit_step(record["clock"], consumed))
        staleness.update(record["clock"] - 1 - row.version_min for row in consumed if row.version_min >= 0)
        reused_tokens += sum(row.num_tokens for row in consumed if 0 < uses[row.trajectory_id] < max_reuse)
        of_step = collections.Counter(row.trajectory_id for row in consumed)
        twice.update(name for name, count in of_step.items() if count > 1)
        uses.update(of_step)
    return RunAudit(
        steps=steps,
        staleness=dict(sorted(staleness.items())),
        staleness_violations=sum(count for value, count in staleness.items() if value > max_staleness),
        consumed_twice=sorted(twice.union(name for name, count in uses.items() if count > max_reuse)),
        policy_versions=sorted(totals.versions),
        consumed_tokens=sum(step.num_tokens for step in steps) - reused_tokens,
        reused_tokens=reused_tokens,
        written_tokens=totals.written_tokens,
        generated_tokens=totals.generated_tokens,
        written_trajectories=totals.written_trajectories,
        unreadable=totals.unreadable,
    )


def _references(record: Mapping[str, Any]) -> list[tuple[str, int]]:
    try:
        return [(str(group["shard"]), int(row)) for group in record["groups"] for row in group["rows"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptObject(f"step record {record.get('clock')}: {error!r}") from error


def _read_shards(
    store: ObjectStore, wanted: Mapping[str, Sequence[int]]
) -> tuple[_Totals, dict[tuple[str, int], _Row]]:
    """Totals over all shards, and the rows that steps consumed."""
    totals, rows = _Totals(), {}
    archive = ShardArchive(store)
    keys = archive.keys()
    totals.unreadable.update(dict.fromkeys(archive.strays, "not a shard's name"))
    for shard in archive.read(keys):
        if shard.rows is None:
            totals.unreadable[shard.key] = shard.fault
            continue
        _add_totals(totals, shard.rows)
        found = _rows(shard.rows, wanted.get(shard.key, ()))
        rows.update({(shard.key, row): value for row, value in found.items()})
    return totals, rows


def _add_totals(totals: _Totals, rows: ShardRows) -> None:
    totals.written_trajectories += rows.num_rows
    totals.written_tokens += int(rows.column("num_tokens").sum())
    totals.generated_tokens += int(rows.column("num_policy_tokens").sum())
    totals.versions.update(v for v in np.unique(rows.ragged("token_policy_version")[1]).tolist() if v >= 0)


def _rows(rows: ShardRows, wanted: Sequence[int]) -> dict[int, _Row]:
    solved = successes(rows) if wanted else np.zeros(0)
    return {
        row: _Row(
            trajectory_id=str(rows.column("trajectory_id")[row]),
            num_tokens=int(rows.column("num_tokens")[row]),
            version_min=int(rows.column("policy_version_min")[row]),
            reward=float(rows.column("reward")[row]),
            success=float(solved[row]),
            created_at=float(rows.column("created_at")[row]),
        )
        for row in wanted
        if row < rows.num_rows and row not in rows.faults
    }


def _consumed(
    rows: Mapping[tuple[str, int], _Row], totals: _Totals, record: Mapping[str, Any], shard: str, row: int
) -> _Row:
    if (shard, row) not in rows:
        why = totals.unreadable.get(shard, "the shard or the row is missing, or the row is faulty")
        raise CorruptObject(f"step {record['clock']} consumed {shard} row {row}: {why}")
    return rows[shard, row]


def _audit_step(clock: int, consumed: Sequence[_Row]) -> StepAudit:
    ages = [clock - 1 - row.version_min for row in consumed if row.version_min >= 0]
    return StepAudit(
        clock=clock,
        num_trajectories=len(consumed),
        num_tokens=sum(row.num_tokens for row in consumed),
        mean_reward=float(np.mean([row.reward for row in consumed])) if consumed else float("nan"),
        success_share=float(np.mean([row.success for row in consumed])) if consumed else float("nan"),
        mean_staleness=float(np.mean(ages)) if ages else 0.0,
        max_staleness=max(ages, default=0),
        newest_created_at=max((row.created_at for row in consumed), default=float("nan")),
    )


def ledger_faults(ledger: Mapping[str, int], audit: RunAudit) -> list[str]:
    """What is wrong with the learner's ledger (tokens by class), judged by identity and by the audit."""
    missing = [name for name in ("read", *LEDGER_CLASSES) if name not in ledger]
    if missing:
        return [f"ledger: {', '.join(missing)} missing"]
    faults = []
    total = sum(ledger[name] for name in LEDGER_CLASSES)
    if total != ledger["read"]:
        faults.append(f"ledger: the classes add up to {total} tokens, read are {ledger['read']}")
    if ledger["consumed"] != audit.consumed_tokens:
        faults.append(f"ledger: consumed {ledger['consumed']} tokens, the step records hold {audit.consumed_tokens}")
    if ledger["read"] > audit.written_tokens:
        faults.append(f"ledger: read {ledger['read']} tokens, the shards hold {audit.written_tokens}")
    return faults

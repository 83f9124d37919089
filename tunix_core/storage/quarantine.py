"""Why a shard or rows of it were refused, `quarantine/<shard>.json`. The shard itself stays where it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tunix_core import paths
from tunix_core.storage.store import ObjectStore, map_requests, read_json, update_json
from tunix_core.types import RowRef


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuarantineEntry:
    """What was refused of one shard."""

    shard: str
    reason: str | None
    """Why the whole shard is unreadable; None where only rows were refused."""
    num_bytes: int
    rows: Mapping[int, str]
    """Row -> reason."""


def quarantine_shard(store: ObjectStore, key: str, reason: str, *, num_bytes: int = 0) -> None:
    """Record that a shard is unreadable; repeating it changes nothing."""
    _update(store, key, lambda entry: {**entry, "reason": entry["reason"] or reason, "num_bytes": num_bytes})


def quarantine_rows(store: ObjectStore, key: str, faults: Mapping[int, str]) -> None:
    """Record that rows of a shard are unusable; the first reason given for a row stands."""
    new = {str(row): reason for row, reason in faults.items()}
    _update(store, key, lambda entry: {**entry, "rows": {**new, **entry["rows"]}})


def quarantine_row(store: ObjectStore, ref: RowRef, reason: str) -> None:
    """Record that one row is unusable."""
    quarantine_rows(store, ref.shard, {ref.row: reason})


def read_quarantine(store: ObjectStore) -> list[QuarantineEntry]:
    """Everything refused, by shard."""
    values = map_requests(store, lambda key: read_json(store, key), store.list_after(paths.QUARANTINE))
    return [
        QuarantineEntry(
            shard=value["shard"],
            reason=value["reason"],
            num_bytes=int(value["num_bytes"]),
            rows={int(row): reason for row, reason in value["rows"].items()},
        )
        for value in values
    ]


def _update(store: ObjectStore, key: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    def apply(current: dict[str, Any] | None) -> dict[str, Any] | None:
        changed = change(current or {"shard": key, "reason": None, "num_bytes": 0, "rows": {}})
        return None if changed == current else changed

    update_json(store, paths.quarantine(key), apply)

"""Checkpoints of the learner: Orbax writes a local folder, the store uploads it.

Contents: the trainer's state (parameters, optimizer, step) in `state/`; the reader's cursors, the ledger
and references to buffered rows in `buffer.json`; which trajectories have been seen in `seen.npz`; and
as metadata, for people and other processes, the ledger, the pacing state and the running totals. Everything Orbax gets is a host copy in
NumPy, so saving compiles nothing and the next step may overwrite the device's arrays meanwhile.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from tunix_core.errors import CorruptObject, ObjectMissing
from tunix_core.storage.checkpoints import CheckpointStore
from tunix_core.storage.store import ObjectStore

_FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """All that a learner goes on from."""

    clock: int
    state: Mapping[str, np.ndarray]
    """The trainer's state by leaf name."""
    buffer: Mapping[str, Any]
    """`ReplayBuffer.state()`, the JSON part: cursors and ledger are in it."""
    seen: Mapping[str, np.ndarray]
    """… and its arrays."""
    totals: Mapping[str, Any]
    """Pacing state and running totals of the run."""


def save(store: ObjectStore, checkpoint: Checkpoint, *, incarnation: str) -> None:
    """Write and upload; complete when this returns."""
    folder = Path(tempfile.mkdtemp(prefix="tunix-checkpoint-"))
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(folder / "state", dict(checkpoint.state))
        np.savez(folder / "seen.npz", allow_pickle=False, **checkpoint.seen)
        (folder / "buffer.json").write_text(json.dumps(dict(checkpoint.buffer)))
        metadata = {
            "format": _FORMAT,
            "totals": dict(checkpoint.totals),
            "ledger": checkpoint.buffer["ledger"],
            "num_buffered_groups": len(checkpoint.buffer["groups"]),
        }
        CheckpointStore(store).upload(checkpoint.clock, folder, metadata=metadata, incarnation=incarnation)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def load(store: ObjectStore, clock: int) -> Checkpoint:
    """Read one back.

    Raises:
        ObjectMissing: it is not complete.
        CorruptObject: bytes that differ from its manifest, or another format.
    """
    folder = Path(tempfile.mkdtemp(prefix="tunix-checkpoint-"))
    try:
        metadata = CheckpointStore(store).download(clock, folder)
        if metadata.get("format") != _FORMAT:
            raise CorruptObject(f"checkpoint {clock}: received format {metadata.get('format')!r}, accepted {_FORMAT}")
        with ocp.PyTreeCheckpointer() as checkpointer:
            state = {name: np.asarray(value) for name, value in checkpointer.restore(folder / "state").items()}
        with np.load(folder / "seen.npz", allow_pickle=False) as archive:
            seen = dict(archive)
        buffer = json.loads((folder / "buffer.json").read_text())
        return Checkpoint(clock=clock, state=state, buffer=buffer, seen=seen, totals=metadata["totals"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def load_newest(store: ObjectStore, *, before: float = math.inf) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that can be read, None where there is none; and why newer ones could not.

    Args:
        before: only checkpoints of a lower clock.
    """
    refused: list[str] = []
    for clock in reversed([clock for clock in CheckpointStore(store).clocks() if clock < before]):
        try:
            return load(store, clock), refused
        except (CorruptObject, ObjectMissing) as error:
            refused.append(f"checkpoint {clock}: {error}")
    return None, refused

"""Checkpoints of the learner: each host writes a local folder, the store uploads them as one object.

Under `host-<number>/`: the trainer's state (parameters, optimizer, step), of one host in `state/` by Orbax, of several
the parts that each holds, none twice, in `state.safetensors`; the reader's cursors, the ledger and references to buffered rows of its feed in
`buffer.json`; which trajectories its feed has seen in `seen.npz`. As metadata, for people and other processes, the
ledger, the pacing state, the running totals and a table of the parts. All that is written is host copies in NumPy, so
saving compiles nothing and the next step may overwrite the device's arrays meanwhile; hosts wait for each other only before the
manifest, and a state can be restored on another mesh by another number of hosts.

Orbax writes NumPy arrays of process 0 alone, and arrays of several processes only into a folder that all of them share and
with barriers between them; so the parts of several hosts do without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from tunix_core import paths
from tunix_core.data.ledger import Ledger
from tunix_core.distributed.hosts import ALONE, Hosts
from tunix_core.errors import CorruptObject, ObjectMissing
from tunix_core.storage import multifile
from tunix_core.storage.checkpoints import CheckpointStore
from tunix_core.storage.leases import leased
from tunix_core.storage.parts import Part, Parts, Tensors, to_write
from tunix_core.storage.store import ObjectStore
from tunix_core.threads import with_retries

_FORMAT = 2
_PARTS = "state.safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """What one host saves."""

    clock: int
    state: Tensors
    """The trainer's state by leaf name."""
    buffer: Mapping[str, Any] | None
    """`ReplayBuffer.state()`, the JSON part: cursors and ledger are in it. None where the host leads no feed."""
    seen: Mapping[str, np.ndarray]
    """… and its arrays."""
    totals: Mapping[str, Any]
    """Pacing state and running totals of the run; host 0's count."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """All that a learner goes on from."""

    clock: int
    state: Tensors
    """Whole arrays from one host, else parts that are read from the folders of the hosts that have them."""
    buffers: Sequence[Mapping[str, Any]]
    """Of all feeds, in their order."""
    seen: Mapping[str, np.ndarray]
    """Of all feeds, joined."""
    totals: Mapping[str, Any]


def _under(host: int) -> str:
    return f"host-{host:05d}/"


def _orbax() -> Any:
    """A checkpointer of this process alone, which waits for no other."""
    if jax.process_count() == 1:
        return ocp.PyTreeCheckpointer()
    own = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=None, active_processes={own}, barrier_sync_key_prefix=f"host{own}"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def save(store: ObjectStore, checkpoint: Checkpoint, *, incarnation: str, hosts: Hosts = ALONE, feed: int = 0) -> None:
    """Write and upload; complete when this returns.

    Args:
        feed: of this host, where it leads one.
    """
    folder = Path(tempfile.mkdtemp(prefix="tunix-checkpoint-"))
    try:
        arrays, table = to_write(checkpoint.state)
        if hosts.alone:
            with _orbax() as checkpointer:
                checkpointer.save(folder / "state", arrays)
        else:
            (folder / _PARTS).write_bytes(multifile.encode_tensors(arrays))
        np.savez(folder / "seen.npz", allow_pickle=False, **checkpoint.seen)
        (folder / "buffer.json").write_text(json.dumps(checkpoint.buffer))
        part = {
            "files": CheckpointStore(store).upload_part(
                checkpoint.clock, folder, incarnation=incarnation, under=_under(hosts.index)
            ),
            "arrays": {
                key: [str(array.dtype), list(array.shape), *table.get(key, ())] for key, array in arrays.items()
            },
            "feed": None if checkpoint.buffer is None else feed,
            "ledger": None if checkpoint.buffer is None else checkpoint.buffer["ledger"],
            "num_groups": 0 if checkpoint.buffer is None else len(checkpoint.buffer["groups"]),
        }
        complete = functools.partial(_complete, store, checkpoint, incarnation)
        hosts.lead("checkpoints", part, complete)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _complete(store: ObjectStore, checkpoint: Checkpoint, incarnation: str, parts: list[dict[str, Any]]) -> None:
    """On host 0."""
    feeds = sorted((part["feed"], host) for host, part in enumerate(parts) if part["feed"] is not None)
    metadata = {
        "format": _FORMAT,
        "totals": dict(checkpoint.totals),
        "ledger": Ledger.total([part["ledger"] for part in parts if part["ledger"] is not None]).state(),
        "num_buffered_groups": sum(part["num_groups"] for part in parts),
        "feeds": [host for _, host in feeds],
        "arrays": [part["arrays"] for part in parts],
    }
    files = [part["files"] for part in parts]

    def write() -> None:
        CheckpointStore(store).complete(checkpoint.clock, files, metadata=metadata, incarnation=incarnation)

    with_retries(write, threading.Event())


def load(store: ObjectStore, clock: int) -> Loaded:
    """Read one back; with several hosts' parts, their arrays only where something reads them.

    Raises:
        ObjectMissing: it is not complete.
        CorruptObject: bytes that differ from its manifest, or another format.
    """
    checkpoints = CheckpointStore(store)
    metadata = checkpoints.metadata(clock)
    if metadata.get("format") != _FORMAT:
        raise CorruptObject(f"checkpoint {clock}: received format {metadata.get('format')!r}, accepted {_FORMAT}")
    feeds = [_feed(checkpoints, clock, host) for host in metadata["feeds"]]
    return Loaded(
        clock=clock,
        state=_state(checkpoints, clock, metadata["arrays"]),
        buffers=[buffer for buffer, _ in feeds],
        seen={name: np.concatenate([seen[name] for _, seen in feeds]) for name in feeds[0][1]},
        totals=metadata["totals"],
    )


@contextlib.contextmanager
def _downloaded(checkpoints: CheckpointStore, clock: int, under: str) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tunix-checkpoint-"))
    try:
        checkpoints.download(clock, folder, under=under)
        yield folder / under
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _feed(checkpoints: CheckpointStore, clock: int, host: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with _downloaded(checkpoints, clock, f"{_under(host)}buffer.json") as path:
        buffer = json.loads(path.read_text())
    with (
        _downloaded(checkpoints, clock, f"{_under(host)}seen.npz") as path,
        np.load(path, allow_pickle=False) as archive,
    ):
        return buffer, dict(archive)


def _arrays(checkpoints: CheckpointStore, clock: int, host: int) -> dict[str, np.ndarray]:
    with _downloaded(checkpoints, clock, f"{_under(host)}{_PARTS}") as path:
        if path.exists():
            return multifile.decode_tensors(path.read_bytes(), f"checkpoint {clock}, host {host}")
    with _downloaded(checkpoints, clock, f"{_under(host)}state/") as folder, _orbax() as checkpointer:
        return {name: np.asarray(value) for name, value in checkpointer.restore(folder).items()}


def _state(checkpoints: CheckpointStore, clock: int, tables: Sequence[Mapping[str, Sequence[Any]]]) -> Tensors:
    """
    Args:
        tables: of each host, key -> type, shape of the array; of a part also name, shape of the whole and offset.
    """
    if len(tables) == 1 and all(len(entry) == 2 for entry in tables[0].values()):
        return _arrays(checkpoints, clock, 0)
    read = functools.lru_cache(maxsize=None)(functools.partial(_arrays, checkpoints, clock))

    def reading(host: int, key: str) -> Callable[[], np.ndarray]:
        return lambda: read(host)[key]

    found: dict[str, Parts] = {}
    for host, table in enumerate(tables):
        for key, (dtype, shape, *place) in table.items():
            name, whole, offset = place or (key, shape, [0] * len(shape))
            tensor = found.setdefault(name, Parts(whole, dtype, []))
            tensor.parts.append(Part(offset=tuple(offset), shape=tuple(shape), load=reading(host, key)))
    return found


def load_newest(
    store: ObjectStore, *, before: float = math.inf, hosts: Hosts = ALONE
) -> tuple[Loaded | None, list[str]]:
    """The newest checkpoint that all hosts can read, None where there is none; and why newer ones could not.

    Args:
        before: only checkpoints of a lower clock.
    """
    checkpoints = CheckpointStore(store)
    refused: list[str] = []
    for clock in reversed(hosts.lead("restore", None, lambda _: [c for c in checkpoints.clocks() if c < before])):
        loaded, error = None, ""
        try:
            with leased(store, [paths.checkpoint(clock)], reader=f"restore-{hosts.index}"):
                loaded = load(store, clock)
                # What is read later, and perhaps by others, is looked at before anyone builds on it.
                if not all(isinstance(tensor, np.ndarray) for tensor in loaded.state.values()):
                    checkpoints.verify(clock, chosen=lambda place: place % hosts.num_hosts == hosts.index)
        except (CorruptObject, ObjectMissing) as caught:
            error = str(caught)
        errors = [found for found in hosts.gather("restore", error) if found]
        if not errors:
            return loaded, refused
        refused.append(f"checkpoint {clock}: {errors[0]}")
    return None, refused
